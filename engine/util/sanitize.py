"""Text of files, models and people, made harmless for terminals, labels and lists of names."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

MAX_ERROR: Final = 500
"""Largest number of characters of an error, its hint included."""

MAX_HINT: Final = 250
"""Largest number of characters of an error's hint."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""Character shown in the place of one that could act on what shows it."""

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text without characters that act: each of them is replaced by "�".

    These are the control characters of ASCII and Latin-1, with which escape sequences begin; those
    that change the direction of text, so that "gpj.exe" is read as "exe.jpg"; and halves of
    characters. Line breaks and tabs stay, carriage returns are removed. As every character counts
    by itself, a text may come in pieces.
    """
    return _ACTING.sub(REPLACEMENT, text.replace("\r", ""))


def one_line(text: str, most: int = 0) -> str:
    """Return a printable text in one line.

    Args:
        most: largest number of characters, from 3; "…" stands for what is left out of the middle.
            0 for any number.
    """
    if most and len(text) > 4 * most:  # no more is looked at, however much a file holds
        text = f"{text[: 2 * most]}…{text[-2 * most :]}"
    line = printable(" ".join(text.split()))
    if not most or len(line) <= most:
        return line
    n_end = most // 3
    return f"{line[: most - 1 - n_end]}…{line[-n_end:]}"


def error_line(message: str, hint: str = "") -> str:
    """Return an error and what to do about it, in one printable line of limited length."""
    shown = one_line(hint, MAX_HINT)
    room = MAX_ERROR - len(shown) - bool(shown)
    return f"{one_line(message, room)} {shown}".strip()


def json_escaped(document: str) -> str:
    """Return a JSON document in which characters that act are escaped: the same values."""
    return _ACTING.sub(_escaped, document)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


@cache  # reading it takes milliseconds, and predictions of speed ask for it each time
def package_version() -> str:
    """Return Tandem's version; "" where it runs from a folder without being installed."""
    from importlib import metadata  # late: the window does not need it to show

    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return ""
