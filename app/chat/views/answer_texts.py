"""What stands below an answer."""

from __future__ import annotations

from app.chat.message import AnswerStats, Message
from app.engine_client.guesses import guesses_text
from app.translation import tr, tr_later, tr_n
from app.units import decimal

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


def footer_text(stats: AnswerStats) -> str:
    """Return a footer like "61.8 tok/s · 412 tokens · 0.31 s to first token · end of turn"."""
    tokens = tr_n("{n} token", "{n} tokens", stats.n_tokens)
    parts = [decimal(f"{stats.tokens_per_s:.1f} tok/s")] if stats.tokens_per_s > 0 else []
    if stats.n_tokens:
        first = tr("{seconds} s to first token").format(
            seconds=decimal(f"{stats.first_token_s:.2f}")
        )
        parts += [tokens, first]
    guesses = guesses_text(stats.n_accepted, stats.n_drafted, stats.draft_gain)
    parts += [guesses] if guesses else []
    return " · ".join([*parts, tr(REASONS.get(stats.reason, stats.reason))])


def footer_of(message: Message) -> str:
    """Return the footer of an answer that has ended."""
    footer = footer_text(message.stats) if message.stats else ""
    return " · ".join(filter(None, [footer, tr("edited") if message.edited else ""]))


def problem_of(message: Message) -> str:
    """Return what went wrong with an answer that has ended, as a sentence; "" if nothing has."""
    return message.problem or (tr(INTERRUPTED) if message.stats is None else "")


def can_continue(message: Message) -> bool:
    """Return whether the model can go on with an answer, or behind the results of its calls."""
    reason = message.stats.reason if message.stats else "failed"
    has_begun = bool(message.content or message.calls) and not message.waits_for_calls
    return message.has_results or (has_begun and reason in CAN_GO_ON)
