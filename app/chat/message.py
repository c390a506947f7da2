"""A turn of a conversation: its text, the figures of an answer, and the thought in front of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine import Finished

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Figures shown below an answer.

    Attributes:
        reason: reason why the answer ended.
        n_tokens: number of generated tokens.
        tokens_per_s: generation rate.
        first_token_s: time until the first token, in seconds.
        context_tokens: number of context tokens that the conversation filled afterwards; 0 where
            that is unknown, since the answer was cut off.
    """

    reason: str
    n_tokens: int
    tokens_per_s: float
    first_token_s: float
    context_tokens: int

    @classmethod
    def of(cls, finished: Finished) -> AnswerStats:
        usage, timings = finished.usage, finished.timings
        return cls(
            reason=finished.reason,
            n_tokens=usage.completion_tokens,
            tokens_per_s=timings.decode_per_s,
            first_token_s=timings.first_token_s,
            context_tokens=usage.total_tokens,
        )


@dataclass(slots=True)
class Message:
    """A turn of a conversation.

    Attributes:
        role: "user" or "assistant".
        content: text of the turn; of an answer with its thought block.
        stats: figures of an answer; None for a person's turn and while an answer is being written.
        thought_s: seconds that the model spent inside its thought block.
        problem: sentence shown below an answer that ended in an error.
    """

    role: str
    content: str
    stats: AnswerStats | None = None
    thought_s: float | None = None
    problem: str = ""

    def copy(self) -> Message:
        """Return a copy that does not change with this turn."""
        return Message(self.role, self.content, self.stats, self.thought_s, self.problem)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Message:
        """Return the turn stored by `asdict`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: the data is no turn.
        """
        stats, seconds = data.get("stats"), data.get("thought_s")
        return cls(
            role=valid_text(data["role"]),
            content=valid_text(data["content"]),
            stats=_stats(stats) if stats else None,
            thought_s=float(seconds) if seconds is not None else None,
            problem=valid_text(data.get("problem", "")),
        )

    @property
    def is_cut_off(self) -> bool:
        """Whether a closed answer was ended by a failure, or with the program."""
        return self.stats is None or self.stats.reason == "failed"


@dataclass(frozen=True, slots=True)
class Thought:
    """An answer split into its thought (None for none, `is_open` if not finished) and its text."""

    thought: str | None
    answer: str
    is_open: bool = False


def split_thought(text: str) -> Thought:
    """Separate a leading thought block from the answer.

    Some templates open the block in the prompt, so that the text has only its end. The start of a
    tag is held back until it is complete, except for "<", which may be a whole answer.
    """
    start = text.lstrip()
    if start != "<" and len(start) < len(THINK_OPEN) and THINK_OPEN.startswith(start):
        return Thought(None, "")  # too early to tell
    begins = start.startswith(THINK_OPEN)
    body = start.removeprefix(THINK_OPEN) if begins else text
    thought, end, answer = body.partition(THINK_CLOSE)
    if end:
        return Thought(thought.strip(), answer.lstrip())
    return Thought(thought.lstrip(), "", is_open=True) if begins else Thought(None, text)


def valid_text(value: object) -> str:
    """Return a value that is a text.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"a text expected, not {value!r}")
    return value


def _stats(data: Mapping[str, Any]) -> AnswerStats:
    return AnswerStats(
        reason=valid_text(data["reason"]),
        n_tokens=int(data["n_tokens"]),
        tokens_per_s=float(data["tokens_per_s"]),
        first_token_s=float(data["first_token_s"]),
        context_tokens=int(data["context_tokens"]),
    )
