"""Table of the questions: how a loaded model answers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.inquiries.questions import (
    ApplyTemplate,
    CountTokens,
    Detokenize,
    Detokenized,
    Reply,
    TemplateApplied,
    Tokenize,
    Tokenized,
    TokensCounted,
)

if TYPE_CHECKING:
    from engine.inquiries.about_text import TextInquiries
    from engine.progress import IsCancelled

Answering = Callable[["TextInquiries", Any, "IsCancelled"], Reply]
"""Function that returns a model's reply to a question; it may end as cancelled."""


def _counted(model: TextInquiries, question: CountTokens, _: IsCancelled) -> TokensCounted:
    return TokensCounted(*model.count_tokens(question.messages, question.draft))


def _tokenized(model: TextInquiries, question: Tokenize, _: IsCancelled) -> Tokenized:
    ids = model.tokenize(
        question.text, add_special=question.add_special, parse_special=question.parse_special
    )
    return Tokenized(tuple(ids), _pieces(model, ids) if question.has_pieces else ())


def _detokenized(model: TextInquiries, question: Detokenize, _: IsCancelled) -> Detokenized:
    text = model.detokenize(question.ids, skip_special=question.skip_special)
    return Detokenized(text, _pieces(model, question.ids) if question.has_pieces else ())


def _pieces(model: TextInquiries, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(piece) for piece in model.pieces(ids))


def _applied(model: TextInquiries, question: ApplyTemplate, _: IsCancelled) -> TemplateApplied:
    prompt = model.apply_template(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, add_generation_prompt=question.add_generation_prompt,
    )  # fmt: skip
    return TemplateApplied(prompt)


ANSWERING: Mapping[type, Answering] = MappingProxyType(
    {
        CountTokens: _counted,
        Tokenize: _tokenized,
        Detokenize: _detokenized,
        ApplyTemplate: _applied,
    }
)
"""Functions that answer, by the class of the question."""
