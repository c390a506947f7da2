"""A program and its arguments, as people type them in one line."""

from __future__ import annotations

import shlex
import sys

from app.core.translation import tr
from engine import EngineError


def split_command(text: str, *, is_windows: bool = sys.platform == "win32") -> tuple[str, ...]:
    """Return the words of a line; quotes keep words with spaces together.

    Args:
        is_windows: whether a backslash is a letter, as in paths there.

    Raises:
        EngineError: a quote has no end.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if is_windows:
        lexer.escape, lexer.quotes = "", '"'
    try:
        return tuple(lexer)
    except ValueError:
        raise EngineError(tr("A quote in the command has no end.")) from None


def join_command(words: tuple[str, ...], *, is_windows: bool = sys.platform == "win32") -> str:
    """Return a line that `split_command` reads as these words."""
    if not is_windows:
        return shlex.join(words)
    return " ".join(
        f'"{word}"' if not word or " " in word or "\t" in word else word for word in words
    )
