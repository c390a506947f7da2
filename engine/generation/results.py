"""What a generation yields: progress, text, and how it ended. Frozen, picklable, free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.runtime.timeline import TokenTimes

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them were still in the KV cache and not computed again.
        completion_tokens: tokens drawn, an end-of-generation token not counted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one generation.

    Attributes:
        prompt_s: computing the prompt tokens that were not cached.
        decode_s: from the first token to the last.
        first_token_s: from the request to the first token.
        prompt_per_s: computed prompt tokens per second; 0 when there were none.
        decode_per_s: tokens per second after the first; 0 when there was only one.
    """

    prompt_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    prompt_per_s: float = 0.0
    decode_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens computed so far, of those that were not cached."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ContextShifted:
    """The context was full: `n_dropped` old tokens after the system prompt were let go."""

    n_dropped: int


@dataclass(frozen=True, slots=True)
class TokenText:
    """New text, always whole characters, and the token ids it completes."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A generation ended.

    `reason` is "stop" (end-of-generation token or stop string), "length" (max_tokens),
    "context" (the context is full) or "cancelled".
    """

    reason: FinishReason
    usage: Usage
    timings: Timings


GenerationEvent = PrefillProgress | ContextShifted | TokenTimes | TokenText | Finished
