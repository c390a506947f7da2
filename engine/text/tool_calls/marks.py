"""Marks around the parts of an answer, found in streamed text.

A mark is a text, or a restricted regular expression: characters, classes, groups with "|", and the
quantifiers ?, *, + and {m,n} after characters and classes; groups support only "?".
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A character or class, `least` to `most` times; `most` is "" for no limit."""

    text: str
    least: int = 1
    most: str = "1"


@dataclass(frozen=True, slots=True)
class _Choice:
    ways: tuple[tuple[_Node, ...], ...]


_Node = _Repeated | _Choice
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?P<\w+>|[()|]|[^\\]", re.DOTALL)
_QUANTIFIER = re.compile(r"([?*+])|\{(\d+),(\d+)\}")
_COUNTS = {"?": (0, "1"), "*": (0, ""), "+": (1, "")}


class AnswerMark:
    """A mark in a format.

    Args:
        pattern: regular expression, or the text itself.
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
        """Return the first complete mark from `start` on, and where an incomplete one may start.

        Args:
            is_ended: whether the text is complete.

        Returns:
            A match that more text would not change, if any; and the position from which more text
            could complete a mark, else the end of the text.
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
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> tuple[_Node, ...]:
        ways = tuple(self._ways())
        if self._at < len(self._pattern):
            raise ValueError(f"unbalanced bracket in {self._pattern!r}")
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
        match = _TOKEN.match(self._pattern, self._at)
        if match is None or match[0] in ".^$?*+":
            raise ValueError(f"unsupported pattern of a mark: {self._pattern!r}")
        self._at = match.end()
        return match[0]

    def _group(self) -> _Choice:
        ways = tuple(self._ways())
        self._at += 1  # the closing bracket
        least, most = self._counts()
        if most != "1":
            raise ValueError(f"repeated group in {self._pattern!r}")
        return _Choice(ways) if least else _Choice((*ways, ()))

    def _counts(self) -> tuple[int, str]:
        match = _QUANTIFIER.match(self._pattern, self._at)
        if match is None:
            return 1, "1"
        self._at = match.end()
        if self._pattern.startswith("?", self._at):  # non-greedy
            self._at += 1
        return _COUNTS[match[1]] if match[1] else (int(match[2]), match[3])


def _whole(nodes: Sequence[_Node]) -> str:
    return "".join(
        f"(?:{'|'.join(map(_whole, node.ways))})"
        if isinstance(node, _Choice)
        else f"{node.text}{{{node.least},{node.most}}}"
        for node in nodes
    )


def _begun(nodes: Sequence[_Node]) -> str:
    """Return a pattern for incomplete sequences at the end of a text.

    It is about as long as the pattern for the whole sequence, because each node's continuation
    occurs once.
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
    if not nodes:
        return False
    last = nodes[-1]
    if isinstance(last, _Choice):
        return all(_ends_fixed(way) for way in last.ways)
    return last.most == str(last.least)


T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader: it yields when it needs more text, and returns its result."""


class MalformedCall(Exception):
    """Error for unexpected text; the source is still at the beginning of this text."""


class IncomingText:
    """Streamed text.

    Attributes:
        text: received text, without the forgotten beginning.
        at: the reader's position in `text`.
        is_ended: whether the text is complete.
        has_run_out: whether a reader needed more text at the end.
    """

    def __init__(self) -> None:
        self.text, self.at, self.is_ended, self.has_run_out = "", 0, False, False
        self._n_marks = 0

    def add(self, text: str) -> None:
        """Append text, and forget the part already read, unless a reader may go back to it."""
        if not self._n_marks:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    @contextmanager
    def kept(self) -> Iterator[int]:
        """Keep the text read inside a `with` block; yield the position at which it starts."""
        self._n_marks += 1
        try:
            yield self.at
        finally:
            self._n_marks -= 1

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.at == len(self.text):
            if self.is_ended:
                self.has_run_out = True
                return ""
            yield
        return self.text[self.at]

    def skip_space(self, spaces: str = " \t\r\n") -> Reading[str]:
        """Skip whitespace and return the character after it."""
        while (char := (yield from self.peek())) and char in spaces:
            self.at += 1
        return char

    def starts(self, text: str) -> Reading[bool]:
        """Return whether `text` comes next; if so, skip it."""
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
    """Further text of the thinking or the content."""

    part: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a called function; `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of a call's arguments; concatenated, the pieces are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call's arguments, before any other part; incomplete calls must not be run."""

    index: int
    is_whole: bool


AnswerPartEvent = PartText | CallBegun | CallText | CallEnded  # event of a parser
