"""What guessed tokens brought, as text."""

from __future__ import annotations

from app.core.translation import tr
from app.core.units import decimal


def guesses_text(n_right: int, n_guessed: int, gain: float) -> str:
    """Return a text like "7 of 9 guesses right, 2.1× as fast"; "" where none was right.

    Args:
        gain: speed as a multiple of that without guesses; 1 where that is unknown.
    """
    if not n_right:
        return ""
    text = tr("{n} of {total} guesses right").format(n=n_right, total=n_guessed)
    times = f"{gain:.1f}"
    if times == "1.0":
        return text
    speed = tr("{n}× as fast").format(n=decimal(times))
    return f"{text}, {speed}"
