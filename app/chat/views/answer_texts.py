"""What stands below an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.chat.message import AnswerStats, Message
from app.core.engine_client.guesses import guesses_text
from app.core.engine_sentences import translated
from app.core.translation import tr, tr_later, tr_n
from app.core.units import decimal

REASONS = {
    "stop": tr_later("end of turn"),
    "length": tr_later("max tokens"),
    "context": tr_later("context full"),
    "cancelled": tr_later("stopped"),
    "failed": tr_later("interrupted"),
}
CAN_GO_ON = ("length", "context", "cancelled", "failed")
"""Reasons of an end after which an answer can be continued."""

INTERRUPTED = tr_later("This answer was interrupted.")


class FooterPart(NamedTuple):
    """A figure of a footer.

    Attributes:
        place: which ones give way where there is little room: those of higher numbers first.
    """

    text: str
    place: int


def footer_of(message: Message) -> list[FooterPart]:
    """Return the parts of the footer of an answer that has ended."""
    parts = footer_parts(message.stats) if message.stats else []
    return [*parts, FooterPart(tr("edited"), 2)] if message.edited else parts


def footer_parts(stats: AnswerStats) -> list[FooterPart]:
    """Return parts like "61.8 tok/s", "412 tokens", "0.31 s to first token", "end of turn"."""
    parts = []
    if stats.tokens_per_s > 0:
        parts.append(FooterPart(decimal(f"{stats.tokens_per_s:.1f} tok/s"), 0))
    if stats.n_tokens:
        seconds = decimal(f"{stats.first_token_s:.2f}")
        first = tr("{seconds} s to first token").format(seconds=seconds)
        parts.append(FooterPart(tr_n("{n} token", "{n} tokens", stats.n_tokens), 2))
        parts.append(FooterPart(first, 4))
    if guesses := guesses_text(stats.n_accepted, stats.n_drafted, stats.draft_gain):
        parts.append(FooterPart(guesses, 3))
    reason = tr(REASONS.get(stats.reason, stats.reason))
    parts.append(FooterPart(reason, 5 if stats.reason == "stop" else 1))
    return parts


def joined(parts: Sequence[FooterPart]) -> str:
    """Return the parts as one line."""
    return " · ".join(part.text for part in parts)


def fitting_text(parts: Sequence[FooterPart], fits: Callable[[str], bool]) -> str:
    """Return the parts that fit, the most important one at least, with "…" for those left out."""
    kept = list(parts)
    text = joined(kept)
    while len(kept) > 1 and not fits(text):
        kept.remove(max(kept, key=lambda part: part.place))
        text = joined(kept) + " …"
    return text


def problem_of(message: Message) -> str:
    """Return what went wrong with an answer that has ended, as a sentence; "" if nothing has."""
    return translated(message.problem) or (tr(INTERRUPTED) if message.stats is None else "")


def can_continue(message: Message) -> bool:
    """Return whether the model can go on with an answer, or behind the results of its calls."""
    reason = message.stats.reason if message.stats else "failed"
    has_begun = bool(message.content or message.calls) and not message.waits_for_calls
    return message.has_results or (has_begun and reason in CAN_GO_ON)
