"""Makes text from files, models and people harmless for terminals, labels and lists of names."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

MAX_ERROR: Final = 500
"""Maximum length of an error, including its hint, in characters."""

MAX_HINT: Final = 250

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""Replaces control characters."""

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with "�" in place of characters that control its display.

    These are the control characters of ASCII and Latin-1, with which escape sequences start;
    characters that change the direction of text, so that "gpj.exe" is read as "exe.jpg"; and
    surrogates. Line breaks and tabs stay; carriage returns are removed. Chunks work too.
    """
    return _ACTING.sub(REPLACEMENT, text.replace("\r", ""))


def one_line(text: str, most: int = 0) -> str:
    """Return a text as one printable line.

    Args:
        most: maximum number of characters, at least 3; "…" replaces the middle. 0: no limit.
    """
    if most and len(text) > 4 * most:  # keeps the work bounded, however large a file is
        text = f"{text[: 2 * most]}…{text[-2 * most :]}"
    line = printable(" ".join(text.split()))
    if not most or len(line) <= most:
        return line
    n_end = most // 3
    return f"{line[: most - 1 - n_end]}…{line[-n_end:]}"


def error_line(message: str, hint: str = "") -> str:
    """Return an error and its hint as one printable line of limited length."""
    shown = one_line(hint, MAX_HINT)
    room = MAX_ERROR - len(shown) - bool(shown)
    return f"{one_line(message, room)} {shown}".strip()


def json_escaped(document: str) -> str:
    """Return an equivalent JSON document with escaped control characters."""
    return _ACTING.sub(_escaped, document)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


@cache  # reading it takes milliseconds, and every forecast needs it
def package_version() -> str:
    """Return Tandem's version; "" if it runs without being installed."""
    from importlib import metadata  # late: the window can open without it

    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return ""
