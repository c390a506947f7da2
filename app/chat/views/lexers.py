"""Lexers of programming languages, made on a thread: most of them take 20 to 50 ms."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

if TYPE_CHECKING:
    from pygments.lexer import Lexer


class Lexers(QObject):
    """The lexers that were wanted so far."""

    ready = Signal(str)  # language whose lexer is there, or will never be

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Lexer | None] = {}
        self._threads: dict[str, threading.Thread] = {}

    def find(self, language: str) -> Lexer | None:
        """Return the lexer of a language, if it is there."""
        return self._made.get(language)

    def want(self, language: str) -> bool:
        """Have a lexer made; return whether `ready` will tell of it."""
        if not language or language in self._made:
            return False
        if language not in self._threads:
            thread = threading.Thread(target=self._make, args=(language,), daemon=True)
            self._threads[language] = thread
            thread.start()
        return True

    def finish(self) -> None:
        """Wait for all that are being made."""
        for thread in self._threads.values():
            thread.join()

    def _make(self, language: str) -> None:
        """Make a lexer; runs on a thread."""
        self._made[language] = make_lexer(language)
        self.ready.emit(language)


@cache
def lexers() -> Lexers:
    """Return the lexers of this process."""
    return Lexers()


@cache
def make_lexer(language: str) -> Lexer | None:
    """Return the lexer of a language in lower case; None for one that pygments does not know."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None
