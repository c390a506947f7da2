"""Numbers of tokens in a context, and how they are said."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.translation import tr


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """How many tokens the open chat and the draft take of the context.

    Attributes:
        size: size of the context; 0 while no model is loaded.
        n_before: tokens of the system prompt, the messages, and what the chat template adds.
        n_draft: tokens of the message that is being written.
        n_answer: tokens of the answer that is being written.
        n_kept: tokens of `n_before` that stay once all older messages are dropped.
        is_counted: whether the model's tokenizer has counted them; otherwise they are those of
            the last answer.
    """

    size: int = 0
    n_before: int = 0
    n_draft: int = 0
    n_answer: int = 0
    n_kept: int = 0
    is_counted: bool = False

    @property
    def used(self) -> int:
        """Number of all tokens."""
        return self.n_before + self.n_draft + self.n_answer

    @property
    def share(self) -> float:
        """Part of the context that is used; above 1 where it does not fit."""
        return self.used / self.size if self.size else 0.0

    @property
    def fits(self) -> bool:
        """Whether the draft can be sent: the prompt and one token of the answer have room."""
        return not self.size or not self.n_draft or self.used < self.size

    @property
    def fits_alone(self) -> bool:
        """Whether the draft can be sent once all older messages are dropped."""
        return self.n_kept + self.n_draft < self.size

    def tip(self) -> str:
        """Return what is counted and what is left, in a few lines."""
        lines = [
            tr("{used} of {size} tokens").format(used=_spaced(self.used), size=_spaced(self.size))
        ]
        if not self.is_counted:
            return lines[0]
        before = tr("{n} system prompt, messages and template")
        lines.append(before.format(n=_spaced(self.n_before)))
        if self.n_draft:
            lines.append(tr("{n} this message").format(n=_spaced(self.n_draft)))
        if self.n_answer:
            lines.append(tr("{n} the answer so far").format(n=_spaced(self.n_answer)))
        left = self.size - self.used
        if left > 0:
            lines.append(tr("{n} left for the answer").format(n=_spaced(left)))
        else:
            lines.append(tr("{n} too many").format(n=_spaced(1 - left)))
        return "\n".join(lines)


def _spaced(n: int) -> str:
    """Return a number with a thin gap between its thousands."""
    return f"{n:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
