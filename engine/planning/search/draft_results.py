"""Measured speeds with and without guesses of the next tokens, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WAYS = {
    "ngram": "from the text",
    "mtp": "by the model's own block (MTP)",
    "model": "by the draft model",
}
"""Ways of guessing, as sentences name them; "off" is that without."""

LEAST_GAIN = 1.03
"""Gain from which on guesses are said to pay: speeds of single answers vary by some percent."""


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """Tokens per second of answers with one way of guessing.

    Attributes:
        way: "off" without guesses, or "ngram", "mtp" or "model".
        prose_ts: speed of new text.
        quoting_ts: speed of text that stands in the prompt, such as code that is edited.
    """

    way: str
    prose_ts: float
    quoting_ts: float


def reason_for_drafts(trials: Sequence[DraftTrial]) -> str:
    """Return which guesses pay, as a sentence; "" if nothing was compared."""
    plain = next((trial for trial in trials if trial.way == "off"), None)
    if plain is None or len(trials) < 2:
        return ""
    gains = {
        trial.way: (trial.prose_ts / plain.prose_ts, trial.quoting_ts / plain.quoting_ts)
        for trial in trials
        if trial is not plain
    }
    best = max(gains, key=lambda way: sum(gains[way]))
    told = " ".join(
        f"With those {WAYS[way]}, new text is {prose:.2f} times as fast and repeated text"
        f" {quoting:.2f} times."
        for way, (prose, quoting) in gains.items()
    )
    if max(gains[best]) < LEAST_GAIN:
        return f"Guessed tokens do not pay here. {told}"
    end = f" The best are those {WAYS[best]}." if len(gains) > 1 else ""
    return f"Guessed tokens pay here. {told}{end}"
