"""Questions to a loaded model and their answers: commands and closing events, see `engine.events`.

They are frozen, picklable and free of torch. Each is answered between two passes; other answers go
on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, EngineError
from engine.generation.queries.about_text import TextInquiries
from engine.generation.results import TokenLogprob
from engine.generation.scoring import check_n_logprobs, token_logprob
from engine.generation.solo_sequence import SoloSequence, solo_sequence
from engine.model.forward.batch import PROMPT_BATCH
from engine.text.messages import ChatMessage, Tool
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits
    from engine.generation.scheduler import Scheduler
    from engine.model.layers.keys import Keys
    from engine.runtime.thread_runtime import ThreadRuntime


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Command to count the tokens of a prompt that is being written; nothing is computed.

    Attributes:
        messages: messages before the draft; None to count the draft alone, which is quick.
        draft: text of the next message.
        tools: functions that the model may call, which its prompt describes.
    """

    messages: tuple[ChatMessage, ...] | None
    draft: str = ""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensCounted:
    """Closing event of a `CountTokens`.

    Attributes:
        n_before: number of tokens of a prompt without the draft: of the messages, and of what the
            chat template adds; None if only the draft was counted.
        n_draft: number of tokens of the draft.
        n_kept: those of `n_before` that stay once all older messages are dropped; None if unknown.
    """

    n_before: int | None
    n_draft: int
    n_kept: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Command to return the tokens of a text.

    Attributes:
        add_special: whether to add BOS and EOS where the model wants them.
        parse_special: whether to read the spelling of a control token, such as "<|im_end|>", as
            that token.
        has_pieces: whether the bytes of each token are wanted, too.
    """

    text: str
    add_special: bool = False
    parse_special: bool = True
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Closing event of a `Tokenize`.

    Attributes:
        ids: ids of the tokens.
        pieces: bytes that each token adds to a text, if they were wanted; a token may be a part of
            a character.
    """

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Command to return the text of tokens, with all their spaces.

    Attributes:
        skip_special: whether to leave out control tokens, such as BOS.
        has_pieces: whether the bytes of each token are wanted, too.
    """

    ids: tuple[int, ...]
    skip_special: bool = False
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Closing event of a `Detokenize`.

    Attributes:
        text: text of all tokens, with U+FFFD for bytes that are no characters.
        pieces: see `Tokenized`.
    """

    text: str
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ApplyTemplate:
    """Command to write the prompt of a conversation, as a `Generate` would.

    Attributes:
        add_generation_prompt: whether to end where the assistant begins to speak.
        tools, variables, continue_last, thinks, effort: see `engine.events.Generate`.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    variables: str = ""
    continue_last: bool = False
    thinks: bool | None = None
    effort: str = ""
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TemplateApplied:
    """Closing event of an `ApplyTemplate`, with the text of the prompt.

    Attributes:
        n_tokens: number of its tokens, with what the model wants before a text, and with those of
            the conversation's pictures.
    """

    prompt: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Command to compute the embeddings of texts: a vector of length 1 for each.

    Attributes:
        inputs: texts, which get the BOS and EOS that the model wants, or token ids, which are taken
            as they are.
    """

    inputs: tuple[tuple[int, ...] | str, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Closing event of an `Embed`.

    Attributes:
        vectors: embedding of each text: `n_embd` numbers in F32.
        n_tokens: number of tokens of all texts.
    """

    vectors: tuple[tuple[float, ...], ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Command to tell how likely each token of a text is behind those before it.

    Attributes:
        text: a text, whose tokens are those of the same `Generate.prompt`, or token ids, which are
            taken as they are.
        n_logprobs: number of likeliest tokens to name at each place, 20 at most.
    """

    text: tuple[int, ...] | str
    n_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TokensScored:
    """Closing event of a `ScoreTokens`.

    Attributes:
        ids: ids of the text's tokens.
        logprobs: how likely each token but the first was, which has nothing before it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class CountCache:
    """Command to tell how full the KV cache is; nothing is computed."""


@dataclass(frozen=True, slots=True)
class CacheCounted:
    """Closing event of a `CountCache`, in tokens, of which whole pages are counted.

    Attributes:
        n_used: number of tokens in pages of answers under way.
        n_kept: number of tokens in pages that are kept for later prompts, and make room for
            answers where that is wanted.
    """

    n_used: int
    n_kept: int


Question = CountTokens | Tokenize | Detokenize | ApplyTemplate | Embed | ScoreTokens | CountCache
"""Commands that a loaded model answers between two passes."""

Reply = (
    TokensCounted | Tokenized | Detokenized | TemplateApplied | Embedded | TokensScored
    | CacheCounted
)  # fmt: skip
"""Closing events of questions."""


Pooling = Literal["mean", "first", "last"]
"""Mean of the states of all tokens, the first token's state, or the last token's."""

MEAN, CLS, RANK = 1, 2, 4
BY_NUMBER: dict[int, Pooling] = {-1: "last", 0: "last", MEAN: "mean", CLS: "first", 3: "last"}
"""Pooling by `pooling_type`; -1 and 0 do not say any, as most files, and get the last token's."""


def pooling_of(keys: Keys, name: str) -> Pooling:
    """Return how a model's states are pooled.

    Args:
        keys: metadata of the model's file.
        name: name of the model, for error messages.

    Raises:
        EngineError: the model makes no embeddings, or not from states that see only what is before.
    """
    number = keys.integer("pooling_type", -1)
    if number == RANK:
        raise EngineError(
            f"{name} rates how well texts fit together; it makes no embeddings.",
            "Load an embedding model.",
        )
    if number not in BY_NUMBER:
        raise EngineError(
            f"{name} makes embeddings in a way that is not known ({number}).",
            "Load another embedding model.",
        )
    if not keys.flag("attention.causal", True):
        raise EngineError(
            f"{name} reads texts in both directions, which Tandem does not do.",
            "Load an embedding model that reads from left to right, such as Qwen3-Embedding.",
        )
    return BY_NUMBER[number]


def pooled(states: Iterable[NDArray[np.float32]], pooling: Pooling, n: int) -> NDArray[np.float32]:
    """Return the vector of a text, of length 1, (n_embd,).

    Args:
        states: hidden states of its tokens (rows, n_embd), in several parts; the last token's are
            enough if that is what counts, the first token's likewise.
        n: number of its tokens.

    Raises:
        EngineError: the states are no numbers.
    """
    parts = [part.astype(np.float64) for part in states]
    if pooling == "mean":
        vector = np.sum([part.sum(0) for part in parts], 0) / n
    else:
        vector = parts[0][0] if pooling == "first" else parts[-1][-1]
    size = float(np.linalg.norm(vector))
    if not np.isfinite(size):
        raise EngineError("The model gives a text no usable embedding.", "The file may be damaged.")
    found: NDArray[np.float32] = (vector / size if size else vector).astype(np.float32)
    return found


MOST_NUMBERS = 4 << 20
"""Largest number of elements of the vectors of one `Embed`, which are sent at once."""

Check = Callable[[], None]
"""Function that raises `Cancelled` once nobody waits for a computation any more."""


class Inquiries(TextInquiries):
    """The part of `engine.api.Model` that answers questions.

    What it computes for them are fresh sequences in the pages of the cache; answers under way go on
    behind them.
    """

    n_ctx: int
    runtime: ThreadRuntime
    scheduler: Scheduler

    def logits(self, ids: Sequence[int]) -> Logits:
        """Compute the logits after each of `ids`, a fresh sequence, whatever is cached.

        Returns:
            Logits in F32, (len(ids), n_vocab).

        Raises:
            PromptError: no tokens, unknown tokens, or more than the context holds.
        """
        with self._alone("Computing logits", [ids], never, is_noted=True) as (sequence, check):
            return np.concatenate(list(sequence.compute(ids, 0, check, PROMPT_BATCH)))

    def score(
        self, ids: Sequence[int], n_logprobs: int = 0, is_cancelled: IsCancelled = never
    ) -> list[TokenLogprob]:
        """Return how likely each of `ids` but the first was behind those before it.

        Args:
            n_logprobs: number of likeliest tokens to name at each place, 20 at most.
            is_cancelled: asked before each batch; returning True ends it.

        Raises:
            EngineError: tokens that cannot be computed, too many likeliest ones, or cancelled.
        """
        check_n_logprobs(n_logprobs)
        found = list[TokenLogprob]()
        with self._alone("Scoring", [ids], is_cancelled) as (sequence, check):
            for rows in sequence.compute(ids, 0, check, PROMPT_BATCH):
                following = ids[len(found) + 1 :]
                found += [
                    token_logprob(row, token, n_logprobs)
                    for row, token in zip(rows, following, strict=False)
                ]
        return found

    @property
    def cache_use(self) -> tuple[int, int]:
        """Numbers of tokens in the cache: of answers under way, and kept for later prompts."""
        with self._occupancy.use("its cache is being counted"):
            return self.scheduler.cache.usage

    def embed(
        self, inputs: Sequence[str | Sequence[int]], is_cancelled: IsCancelled = never
    ) -> Embedded:
        """Compute a vector of length 1 for each text: its embedding.

        It is pooled from the hidden states behind the model's final norm as the file says, or is
        the last token's where the file says nothing. A text gets the BOS and EOS that the model
        wants, and the spelling of a special token is that token.

        Args:
            inputs: texts, or their token ids, which are taken as they are.
            is_cancelled: asked before each batch; returning True ends it.

        Raises:
            EngineError: the model makes no embeddings, a text is empty or does not fit into the
                context, there are too many, or it was cancelled.
        """
        pooling = pooling_of(self.runtime.hp.keys, self.info.name)
        most = max(1, MOST_NUMBERS // self.info.n_embd)
        if len(inputs) > most:
            raise EngineError(
                f"{len(inputs)} texts are too many to be embedded at once.",
                f"Send up to {most} at a time.",
            )
        prompts = [self._ids_of(one) for one in inputs]
        with self._alone("Embedding", prompts, is_cancelled) as (sequence, check):
            vectors = tuple(_vector(sequence, ids, pooling, check) for ids in prompts)
        return Embedded(vectors, sum(map(len, prompts)))

    def _ids_of(self, text: str | Sequence[int]) -> Sequence[int]:
        if isinstance(text, str):
            return self._prompts.counted(text, self.n_ctx, add_special=True, parse_special=True)
        return text

    @contextmanager
    def _alone(
        self, doing: str, prompts: Sequence[Sequence[int]], is_cancelled: IsCancelled, *,
        is_noted: bool = False,
    ) -> Iterator[tuple[SoloSequence, Check]]:  # fmt: skip
        """Yield an empty sequence, and what to call before each batch.

        Args:
            doing: begin of the sentence that it was cancelled.
            prompts: tokens that will be computed.
            is_noted: see `solo_sequence`.

        Raises:
            EngineError: these tokens cannot be computed, or the model has been closed.
        """
        with self._occupancy.use(f"it is {doing.lower()}", is_cancelled) as is_cancelled:

            def check() -> None:
                if is_cancelled():
                    raise Cancelled(doing)

            for ids in prompts:
                self.scheduler.check(ids)
            runner = self.runtime.runner
            with solo_sequence(self.scheduler, runner, is_noted=is_noted) as sequence:
                yield sequence, check


def _vector(
    sequence: SoloSequence, ids: Sequence[int], pooling: Pooling, check: Check
) -> tuple[float, ...]:
    """Return the embedding of tokens; each number has the fewest digits that tell it in F32."""
    sequence.restart()
    wanted = ids[:1] if pooling == "first" else ids  # the first token sees no other
    first = 0 if pooling == "mean" else len(wanted) - 1
    states = sequence.compute(wanted, first, check, PROMPT_BATCH, wants_hidden=True)
    return tuple(float(str(x)) for x in pooled(states, pooling, len(ids)))


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
