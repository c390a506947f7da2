"""Text that is still coming, read character by character without ever waiting for it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader: it yields where it needs more text, and returns what it has read."""


class BrokenForm(Exception):
    """Text that is not what was to come; the source stands where it begins."""


class IncomingText:
    """Text that is still coming.

    Attributes:
        text: what has come and is not forgotten.
        at: place in it that is read next.
        is_ended: whether no more comes.
        has_run_out: whether a reader wanted more text behind the end.
    """

    def __init__(self) -> None:
        self.text, self.at, self.is_ended, self.has_run_out = "", 0, False, False
        self._n_marks = 0

    def add(self, text: str) -> None:
        """Append text, and forget what has been read unless somebody may go back to it."""
        if not self._n_marks:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    @contextmanager
    def kept(self) -> Iterator[int]:
        """Keep what is read inside a `with` block; give the place where it begins."""
        self._n_marks += 1
        try:
            yield self.at
        finally:
            self._n_marks -= 1

    def peek(self) -> Reading[str]:
        """Return the next character, "" at the end, and stay before it."""
        while self.at == len(self.text):
            if self.is_ended:
                self.has_run_out = True
                return ""
            yield
        return self.text[self.at]

    def skip_space(self, spaces: str = " \t\r\n") -> Reading[str]:
        """Skip white space and return the character after it."""
        while (char := (yield from self.peek())) and char in spaces:
            self.at += 1
        return char

    def starts(self, text: str) -> Reading[bool]:
        """Return whether `text` comes next, and go behind it if it does."""
        while not self.text.startswith(text, self.at):
            rest = self.text[self.at : self.at + len(text)]
            if not text.startswith(rest):
                return False
            if self.is_ended:
                self.has_run_out = True
                return False
            yield
        self.at += len(text)
        return True

    def expect(self, text: str) -> Reading[None]:
        """Skip `text`.

        Raises:
            BrokenForm: something else comes next.
        """
        if not (yield from self.starts(text)):
            raise BrokenForm
