"""Table of the questions: how a loaded model answers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.generation.queries.questions import (
    ApplyTemplate,
    CacheCounted,
    CountCache,
    CountTokens,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Question,
    Reply,
    ScoreTokens,
    TemplateApplied,
    Tokenize,
    Tokenized,
    TokensCounted,
    TokensScored,
)

if TYPE_CHECKING:
    from engine.generation.queries.in_passes import Inquiries
    from engine.util.progress import IsCancelled

Answering = Callable[["Inquiries", Any, "IsCancelled"], Reply]
"""Function that returns a model's reply to a question; it may end as cancelled."""


def _counted(model: Inquiries, question: CountTokens, is_cancelled: IsCancelled) -> TokensCounted:
    counts = model.count_tokens(question.messages, question.draft, question.tools, is_cancelled)
    return TokensCounted(*counts)


def _tokenized(model: Inquiries, question: Tokenize, _: IsCancelled) -> Tokenized:
    ids = model.tokenize(
        question.text, add_special=question.add_special, parse_special=question.parse_special
    )
    return Tokenized(tuple(ids), _pieces(model, ids) if question.has_pieces else ())


def _detokenized(model: Inquiries, question: Detokenize, _: IsCancelled) -> Detokenized:
    text = model.detokenize(question.ids, skip_special=question.skip_special)
    return Detokenized(text, _pieces(model, question.ids) if question.has_pieces else ())


def _pieces(model: Inquiries, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(piece) for piece in model.pieces(ids))


def _applied(
    model: Inquiries, question: ApplyTemplate, is_cancelled: IsCancelled
) -> TemplateApplied:
    prompt = model.apply_template(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        add_generation_prompt=question.add_generation_prompt,
    )  # fmt: skip
    if not has_pictures(question):
        return TemplateApplied(prompt, model.prompt_size(prompt))
    n_tokens = model.chat_size(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        is_cancelled=is_cancelled,
    )  # fmt: skip
    return TemplateApplied(prompt, n_tokens)


def _embedded(model: Inquiries, question: Embed, is_cancelled: IsCancelled) -> Embedded:
    return model.embed(question.inputs, is_cancelled)


def _scored(model: Inquiries, question: ScoreTokens, is_cancelled: IsCancelled) -> TokensScored:
    ids = model.prompt_ids(question.text, model.n_ctx)
    return TokensScored(tuple(ids), tuple(model.score(ids, question.n_logprobs, is_cancelled)))


def _cache_counted(model: Inquiries, question: CountCache, _: IsCancelled) -> CacheCounted:
    return CacheCounted(*model.cache_use)


BESIDE = (CountTokens, Tokenize, Detokenize, ApplyTemplate)
"""Questions that any thread may answer, also while tokens are computed."""

ANSWERING: Mapping[type, Answering] = MappingProxyType(
    {
        CountTokens: _counted,
        Tokenize: _tokenized,
        Detokenize: _detokenized,
        ApplyTemplate: _applied,
        Embed: _embedded,
        ScoreTokens: _scored,
        CountCache: _cache_counted,
    }
)
"""Functions that answer, by the class of the question."""


def has_pictures(question: Question) -> bool:
    """Return whether pictures are read for the reply to a question, which may take seconds."""
    messages = question.messages if isinstance(question, CountTokens | ApplyTemplate) else None
    return any(message.pictures for message in messages or ())


def reply_to(model: Inquiries, question: Question, is_cancelled: IsCancelled) -> Reply:
    """Return a model's reply to a question.

    Args:
        is_cancelled: asked again and again; returning True ends what is computed for it.

    Raises:
        EngineError: the question cannot be answered, or it was cancelled.
    """
    return ANSWERING[type(question)](model, question, is_cancelled)
