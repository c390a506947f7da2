"""Marks around the parts of an answer, found in text that is still coming.

A mark is a text, or a regular expression of a small kind: characters, classes, groups with "|", and
the quantifiers ?, *, + and {m,n} behind characters and classes; groups take only "?".
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A character or class, `least` to `most` times; `most` is "" without a limit."""

    text: str
    least: int = 1
    most: str = "1"


@dataclass(frozen=True, slots=True)
class _Choice:
    """A group: one of several sequences."""

    ways: tuple[tuple[_Node, ...], ...]


_Node = _Repeated | _Choice
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?P<\w+>|[()|]|[^\\]", re.DOTALL)
_QUANTIFIER = re.compile(r"([?*+])|\{(\d+),(\d+)\}")
_COUNTS = {"?": (0, "1"), "*": (0, ""), "+": (1, "")}


class AnswerMark:
    """A mark of a form.

    Args:
        pattern: regular expression, or the text itself.

    Attributes:
        pattern: regular expression.
    """

    def __init__(self, pattern: str, *, is_text: bool = False) -> None:
        self.pattern = re.escape(pattern) if is_text else pattern
        self._whole = re.compile(self.pattern, re.DOTALL)
        nodes = _Reader(self.pattern).read()
        self._begun = re.compile(_begun(nodes), re.DOTALL)
        self._is_fixed = _ends_fixed(nodes)

    def find(
        self, text: str, start: int, *, is_ended: bool = False
    ) -> tuple[re.Match[str] | None, int]:
        """Return the first whole mark from `start` on, and where one may have begun.

        Args:
            is_ended: whether no more text comes.

        Returns:
            A match that more text would not change, if there is one; and the place from which on
            more text may make a mark, the end of the text if there is none.
        """
        whole = self._whole.search(text, start)
        if is_ended:
            return whole, len(text)
        if whole and whole.end() == len(text) and not self._is_fixed:
            return None, whole.start()
        begun = self._begun.search(text, start)
        held = len(text) if begun is None else begun.start()
        if whole and (whole.start() < held or whole.end() == len(text)):
            return whole, len(text)
        return None, held


class _Reader:
    """Reader of a regular expression with as much syntax as marks need."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> tuple[_Node, ...]:
        ways = tuple(self._ways())
        if self._at < len(self._pattern):
            raise ValueError(f"a bracket too many in {self._pattern!r}")
        return ways[0] if len(ways) == 1 else (_Choice(ways),)

    def _ways(self) -> Iterator[tuple[_Node, ...]]:
        nodes: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            token = self._token()
            if token == "|":
                yield tuple(nodes)
                nodes = []
            elif token.startswith("("):
                nodes.append(self._group())
            elif token != r"\Z":
                nodes.append(_Repeated(token, *self._counts()))
        yield tuple(nodes)

    def _token(self) -> str:
        found = _TOKEN.match(self._pattern, self._at)
        if found is None or found[0] in ".^$?*+":
            raise ValueError(f"not a pattern of a mark: {self._pattern!r}")
        self._at = found.end()
        return found[0]

    def _group(self) -> _Choice:
        ways = tuple(self._ways())
        self._at += 1  # the closing bracket
        least, most = self._counts()
        if most != "1":
            raise ValueError(f"a repeated group in {self._pattern!r}")
        return _Choice(ways) if least else _Choice((*ways, ()))

    def _counts(self) -> tuple[int, str]:
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return 1, "1"
        self._at = found.end()
        if self._pattern.startswith("?", self._at):  # as few as will do
            self._at += 1
        return _COUNTS[found[1]] if found[1] else (int(found[2]), found[3])


def _whole(nodes: Sequence[_Node]) -> str:
    return "".join(
        f"(?:{'|'.join(map(_whole, node.ways))})"
        if isinstance(node, _Choice)
        else f"{node.text}{{{node.least},{node.most}}}"
        for node in nodes
    )


def _begun(nodes: Sequence[_Node]) -> str:
    """Return a pattern for the beginnings of a sequence at the end of a text.

    It is about as long as the sequence: what follows a node stands in it once.
    """
    if not nodes:
        return "(?!)"
    node, *rest = nodes
    if isinstance(node, _Choice):
        begun = "|".join(map(_begun, node.ways))
    elif node.least == 1:
        return rf"{_whole([node])}(?:\Z|{_begun(rest)})"
    else:
        begun = rf"{node.text}{{1,{node.most}}}\Z"
    return f"(?:{begun}|{_whole([node])}{_begun(rest)})"


def _ends_fixed(nodes: Sequence[_Node]) -> bool:
    """Return whether more text never makes a whole mark longer."""
    if not nodes:
        return False
    last = nodes[-1]
    if isinstance(last, _Choice):
        return all(_ends_fixed(way) for way in last.ways)
    return last.most == str(last.least)


T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader: it yields where it needs more text, and returns what it has read."""


class MalformedCall(Exception):
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
            MalformedCall: something else comes next.
        """
        if not (yield from self.starts(text)):
            raise MalformedCall


@dataclass(frozen=True, slots=True)
class PartText:
    """More text of what is thought or said."""

    part: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a function that is called.

    Attributes:
        index: number of the call in its answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of the arguments of a call: all texts of a whole call together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of the arguments of a call, before any other part.

    Attributes:
        is_whole: whether they are whole; else they broke off, and the call must not be run.
    """

    index: int
    is_whole: bool


AnswerPartEvent = PartText | CallBegun | CallText | CallEnded
"""What a parser tells."""
