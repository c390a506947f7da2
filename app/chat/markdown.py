"""A Markdown parser for views that write pieces of text and never touch HTML.

The dialect is CommonMark with tables and strikethrough. HTML stays text, images become their
description and address, and link reference definitions stay text, too, so that every top-level
block means the same on its own. That makes streaming exact: `MarkdownStream` returns each block
once, when no later line can change it, and parses only the rest again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

OPENED_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A run of text in one style; `href` is an http(s) address or ""."""

    text: str
    bold: bool = False
    italic: bool = False
    code: bool = False
    strike: bool = False
    href: str = ""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A paragraph, heading or list item.

    Attributes:
        spans: text of the line.
        heading: level of a heading, 1 to 6; 0 for other lines.
        marker: bullet or number of a list item, such as "•" or "3."; "" for other lines.
        indent: depth of lists around the line.
        quote: depth of block quotes around the line.
        tight: whether the line follows the previous one without a gap.
    """

    spans: tuple[TextSpan, ...]
    heading: int = 0
    marker: str = ""
    indent: int = 0
    quote: int = 0
    tight: bool = False


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A code block; `language` is the word after the fence, may be ""."""

    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: rows of cells, header first; `aligns` has "left", "center" or "right" per column."""

    rows: tuple[tuple[tuple[TextSpan, ...], ...], ...]
    aligns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line."""


Piece = TextLine | CodeBlock | Table | Rule


@cache
def _parser(*, is_inline: bool) -> MarkdownIt:
    """Return the parser of whole texts, or the one that only tells blocks apart."""
    from markdown_it import MarkdownIt  # late: a window without messages shows sooner

    parser = MarkdownIt("commonmark", {"html": False, "linkify": False})
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block"])
    return parser if is_inline else parser.disable("inline")


def parse(text: str) -> list[Piece]:
    """Return the pieces of a complete text."""
    builder = _Builder()
    for token in _parser(is_inline=True).parse(_normal(text)):
        builder.take(token)
    return builder.pieces


class MarkdownStream:
    """Parser of a text that grows at its end."""

    def __init__(self) -> None:
        self._tail = ""

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are now final."""
        self._tail += _normal(text)
        if "\n" not in text:
            return []
        cut = self._tail_start()
        done, self._tail = self._tail[:cut], self._tail[cut:]
        return parse(done) if done else []

    def tail(self) -> list[Piece]:
        """Return the pieces that more text may still change."""
        return parse(self._tail)

    def _tail_start(self) -> int:
        """Return the offset of the last top-level block, looking at complete lines only."""
        complete = self._tail[: self._tail.rfind("\n") + 1]
        blocks = _parser(is_inline=False).parse(complete)
        starts = [token.map[0] for token in blocks if token.level == 0 and token.map]
        if len(starts) < 2:
            return 0
        lines = complete.split("\n")
        return sum(len(line) + 1 for line in lines[: starts[-1]])


def _normal(text: str) -> str:
    return text.replace("\r", "").replace("\0", "\ufffd")


@dataclass(slots=True)
class _List:
    """An open list; `number` is its next number, None for bullets."""

    number: int | None

    def next_marker(self) -> str:
        if self.number is None:
            return "•"
        self.number += 1
        return f"{self.number - 1}."


@dataclass(slots=True)
class _Builder:
    """Builder of pieces from tokens, with the state that the next line depends on."""

    pieces: list[Piece] = field(default_factory=list)
    lists: list[_List] = field(default_factory=list)
    quote: int = 0
    heading: int = 0
    hidden: bool = False
    marker: str = ""
    rows: list[list[tuple[TextSpan, ...]]] = field(default_factory=list)
    aligns: list[str] = field(default_factory=list)
    in_table: bool = False
    opens_list: bool = False  # the next line is the first of an outermost list

    def take(self, token: Token) -> None:
        handler = getattr(self, f"_on_{token.type}", None)
        if handler is not None:
            handler(token)

    def _on_heading_open(self, token: Token) -> None:
        self.heading = int(token.tag[1])

    def _on_heading_close(self, token: Token) -> None:
        self.heading = 0

    def _on_paragraph_open(self, token: Token) -> None:
        self.hidden = token.hidden

    def _on_blockquote_open(self, token: Token) -> None:
        self.quote += 1

    def _on_blockquote_close(self, token: Token) -> None:
        self.quote -= 1

    def _on_bullet_list_open(self, token: Token) -> None:
        self._open_list(None)

    def _on_ordered_list_open(self, token: Token) -> None:
        start = token.attrGet("start")
        self._open_list(int(start) if start is not None else 1)

    def _open_list(self, number: int | None) -> None:
        self.opens_list = not self.lists
        if self.opens_list:
            self.hidden = True  # an item without text must not look like the block before the list
        self.lists.append(_List(number))

    def _on_bullet_list_close(self, token: Token) -> None:
        self.lists.pop()

    _on_ordered_list_close = _on_bullet_list_close

    def _on_list_item_open(self, token: Token) -> None:
        self.marker = self.lists[-1].next_marker()

    def _on_list_item_close(self, token: Token) -> None:
        if self.marker:  # an item without text
            self._add_line(())

    def _on_inline(self, token: Token) -> None:
        spans = _spans(token.children or [])
        if self.in_table:
            self.rows[-1].append(spans)
        else:
            self._add_line(spans)

    def _add_line(self, spans: tuple[TextSpan, ...]) -> None:
        self.pieces.append(
            TextLine(
                spans,
                heading=self.heading,
                marker=self.marker,
                indent=len(self.lists),
                quote=self.quote,
                tight=self.hidden and bool(self.lists) and not self.opens_list,
            )
        )
        self.marker, self.opens_list = "", False

    def _on_fence(self, token: Token) -> None:
        self._flush_marker()
        language = token.info.strip().split()
        self.pieces.append(CodeBlock(token.content.rstrip("\n"), language[0] if language else ""))

    def _on_code_block(self, token: Token) -> None:
        self._flush_marker()
        self.pieces.append(CodeBlock(token.content.rstrip("\n")))

    def _on_hr(self, token: Token) -> None:
        self.pieces.append(Rule())

    def _flush_marker(self) -> None:
        if self.marker:
            self._add_line(())

    def _on_table_open(self, token: Token) -> None:
        self.in_table, self.rows, self.aligns = True, [], []

    def _on_tr_open(self, token: Token) -> None:
        self.rows.append([])

    def _on_th_open(self, token: Token) -> None:
        style = str(token.attrGet("style") or "")
        self.aligns.append(style.removeprefix("text-align:") or "left")

    def _on_table_close(self, token: Token) -> None:
        self.in_table = False
        self.pieces.append(Table(tuple(tuple(row) for row in self.rows), tuple(self.aligns)))


_BREAKS = {"softbreak", "hardbreak"}


def _spans(tokens: list[Token]) -> tuple[TextSpan, ...]:
    """Return the styled runs of one paragraph, with its line breaks kept."""
    spans: list[TextSpan] = []
    style = TextSpan("")
    for token in tokens:
        name, _, event = token.type.rpartition("_")
        is_on = event == "open"
        if name == "strong":
            style = replace(style, bold=is_on)
        elif name == "em":
            style = replace(style, italic=is_on)
        elif name == "s":
            style = replace(style, strike=is_on)
        elif token.type == "link_open":
            style = replace(style, href=_opened(str(token.attrGet("href") or "")))
        elif token.type == "link_close":
            style = replace(style, href="")
        elif token.type == "image":
            spans += _image(token, style)
        elif token.type in _BREAKS:
            spans.append(replace(style, text="\n"))
        elif token.content:
            spans.append(replace(style, text=token.content, code=token.type == "code_inline"))
    return _joined(spans)


def _joined(spans: list[TextSpan]) -> tuple[TextSpan, ...]:
    """Join neighbouring spans of equal style."""
    result: list[TextSpan] = []
    for span in spans:
        if result and replace(result[-1], text="") == replace(span, text=""):
            result[-1] = replace(span, text=result[-1].text + span.text)
        else:
            result.append(span)
    return tuple(result)


def _image(token: Token, style: TextSpan) -> list[TextSpan]:
    """Return the description and address of an image, which is never fetched."""
    source = str(token.attrGet("src") or "")
    address = replace(style, text=source, href=style.href or _opened(source))
    if not token.content:
        return [address]
    around = [replace(style, text=f"{token.content} ("), address, replace(style, text=")")]
    return around if source else [replace(style, text=token.content)]


def _opened(address: str) -> str:
    """Return `address` if a click may open it, else ""."""
    try:
        return address if urlsplit(address).scheme.lower() in OPENED_SCHEMES else ""
    except ValueError:
        return ""
