"""Events of a generation: progress, text and end; frozen, picklable, free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.runtime.timeline import TokenTimes

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""Reason why a generation stopped; see `Finished`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation.

    Attributes:
        cached_tokens: how many of the prompt tokens were in the KV cache and not computed again.
        completion_tokens: number of generated tokens, excluding an end-of-generation token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def total_tokens(self) -> int:
        """Number of tokens in prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Times and speeds of one generation.

    Attributes:
        prompt_s: seconds of prefill, for prompt tokens that were not cached.
        decode_s: seconds from the first generated token to the last.
        first_token_s: seconds from the request to the first generated token.
        prompt_per_s: speed of prefill in tokens per second; 0 if all tokens were cached.
        decode_per_s: speed of decode in tokens per second; 0 for fewer than two tokens.
        saved_s: seconds of decode that drafts saved, compared with passes without them; negative if
            drafts were slower.
    """

    prompt_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    prompt_per_s: float = 0.0
    decode_per_s: float = 0.0
    saved_s: float = 0.0

    @property
    def draft_gain(self) -> float:
        """Speed of decode relative to decode without drafts; 1 if not measured."""
        without = self.decode_s + self.saved_s
        return without / self.decode_s if self.decode_s > 0 and without > 0 else 1.0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Number of prompt tokens computed so far, out of all that were not cached."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ContextShifted:
    """Removal of the `n_dropped` oldest tokens after the system prompt from a full context."""

    n_dropped: int


AnswerPart = Literal["content", "reasoning"]
"""Part that a text belongs to: the answer itself, or the thinking before it."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, from the model's logits at temperature 1.

    Attributes:
        logprob: natural logarithm of its probability.
        top: ids and log probabilities of the likeliest tokens at this position, likeliest first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenText:
    """New text, always in whole characters, and the ids of the tokens it completes.

    Attributes:
        part: part that the text belongs to, if the answer is in parts (`AnswerRequest.in_parts`).
        logprobs: log probability of each token, if requested (`AnswerRequest.n_logprobs`).
    """

    text: str
    ids: tuple[int, ...]
    part: AnswerPart = "content"
    logprobs: tuple[TokenLogprob, ...] = ()


def join_texts(texts: Sequence[TokenText]) -> TokenText:
    """Join consecutive texts from the same part of an answer."""
    return TokenText(
        "".join(text.text for text in texts),
        tuple(chain.from_iterable(text.ids for text in texts)),
        texts[0].part,
        tuple(chain.from_iterable(text.logprobs for text in texts)),
    )


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The name of a function that the model calls; its arguments follow.

    Attributes:
        index: index of the call in this answer, from 0.
        id: unique id of the call.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """More of a call's arguments; the concatenated texts of a complete call are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The end of a call's arguments, before any other part of the answer.

    Attributes:
        is_whole: whether the arguments are complete. If not, for example because of a token limit,
            they are not valid JSON, and the call must not be run.
    """

    index: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation.

    Attributes:
        reason: "stop" (end-of-generation token or stop string), "length" (max_tokens), "context"
            (the context is full) or "cancelled".
        stop: the stop string that ended it; "" if none did.
        end: log probability of the end-of-generation token that ended it, if any and if requested
            (`AnswerRequest.n_logprobs`).
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str = ""
    end: TokenLogprob | None = None

    @property
    def plain_per_s(self) -> float:
        """Speed of decode without drafts, in tokens per second; 0 if unknown."""
        is_unknown = self.usage.n_drafted > 0 and self.timings.saved_s == 0
        return 0.0 if is_unknown else self.timings.decode_per_s / self.timings.draft_gain


@dataclass(frozen=True, slots=True)
class StateSaved:
    """Closing event of a `SaveState`; a file of `n_bytes` has the first `n_tokens` tokens."""

    path: str
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """Closing event of a `LoadState`, with the ids of the tokens that are now cached."""

    path: str
    ids: tuple[int, ...]


GenerationEvent = (
    PrefillProgress
    | ContextShifted
    | TokenTimes
    | TokenText
    | ToolCallBegun
    | ToolCallText
    | ToolCallEnded
    | Finished
)
