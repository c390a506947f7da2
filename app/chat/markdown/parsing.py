"""Parsers for complete and growing texts.

`MarkdownStream` returns each top-level block once it is final, and reparses only the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from app.chat.markdown.delimiters import Formula, formula_rules
from app.chat.markdown.pieces import (
    CodeBlock,
    DisplayFormula,
    Piece,
    Rows,
    Rule,
    Table,
    TextLine,
    TextSpan,
    spans_of,
)

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

TASK = re.compile(r"\[([ xX])\]\s+")
"""Checkbox at the start of a list item."""

MAX_OPEN_ROWS = 32
"""Maximum number of rows that are reparsed when a table grows."""


@cache
def _parser(*, is_inline: bool) -> MarkdownIt:
    from markdown_it import MarkdownIt  # late: speeds up the start of an empty window
    from mdit_py_plugins.footnote import footnote_plugin

    parser = MarkdownIt("commonmark", {"html": False, "linkify": False})
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block"])
    parser.use(footnote_plugin, inline=False, move_to_end=False, always_match_refs=True)
    parser.use(formula_rules)
    return parser if is_inline else parser.disable("inline")


def parse(text: str) -> list[Piece]:
    """Return the pieces of a complete text."""
    builder = _Builder()
    for token in _parser(is_inline=True).parse(normal(text)):
        builder.take(token)
    return builder.pieces


@dataclass(frozen=True, slots=True)
class TopBlock:
    """A top-level block in a text.

    Attributes:
        kind: token type, such as "fence" or "table_open".
        start, end: offset of its first line, and offset after its last line.
    """

    kind: str
    start: int
    end: int


def top_blocks(text: str) -> list[TopBlock]:
    """Return a normalized text's top-level blocks, ten times as fast as `parse`."""
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    tokens = _parser(is_inline=False).parse(text)
    return [
        TopBlock(token.type, starts[token.map[0]], min(starts[token.map[1]], len(text)))
        for token in tokens
        if token.level == 0 and token.map
    ]


class MarkdownStream:
    """Parser for a growing text; even rows of a long table are parsed only once."""

    def __init__(self) -> None:
        self._tail = ""
        self._rows: Rows = ()  # final rows, removed from the table in the tail

    def feed(self, text: str) -> list[Piece]:
        """Append text and return the pieces that are now final."""
        self._tail += normal(text)
        if "\n" not in text:
            return []
        cut = self._tail_start()
        if not cut:
            self._keep_rows()
            return []
        done, self._tail = self._tail[:cut], self._tail[cut:]
        pieces = self._with_rows(parse(done))
        self._rows = ()
        return pieces

    def tail(self) -> list[Piece]:
        """Return the pieces that further text may change."""
        return self._with_rows(parse(self._tail))

    def _tail_start(self) -> int:
        blocks = top_blocks(self._tail[: self._tail.rfind("\n") + 1])
        return blocks[-1].start if len(blocks) > 1 else 0

    def _keep_rows(self) -> None:
        # all rows of a table but the last are final
        lines = self._tail.split("\n")
        if len(lines) < 2 + MAX_OPEN_ROWS or not lines[0].count("|"):
            return
        pieces = parse("\n".join(lines[:-1]))
        if len(pieces) != 1 or not isinstance(table := pieces[0], Table):
            return
        if len(table.rows) == len(lines) - 2:  # a two-line header, an incomplete line
            self._rows += table.rows[1:-1]
            self._tail = "\n".join((*lines[:2], *lines[-2:]))

    def _with_rows(self, pieces: list[Piece]) -> list[Piece]:
        if self._rows:
            table = pieces[0]
            assert isinstance(table, Table)
            pieces[0] = replace(table, rows=(table.rows[0], *self._rows, *table.rows[1:]))
        return pieces


def normal(text: str) -> str:
    """Return a text with carriage returns removed, and NULs replaced as CommonMark requires."""
    return text.replace("\r", "").replace("\0", "\ufffd")


@dataclass(slots=True)
class _List:
    number: int | None  # of the next item; None for bullets

    def next_marker(self) -> str:
        if self.number is None:
            return "•"
        self.number += 1
        return f"{self.number - 1}."


@dataclass(slots=True)
class _Builder:
    pieces: list[Piece] = field(default_factory=list)
    lists: list[_List] = field(default_factory=list)
    quote: int = 0
    heading: int = 0
    hidden: bool = False
    marker: str = ""
    rows: list[list[tuple[TextSpan, ...]]] = field(default_factory=list)
    aligns: list[str] = field(default_factory=list)
    in_table: bool = False
    opens_list: bool = False  # whether the next line starts an outermost list
    note: str = ""

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
            self.hidden = True  # an empty item must not inherit this from the block before
        self.lists.append(_List(number))

    def _on_bullet_list_close(self, token: Token) -> None:
        self.lists.pop()

    _on_ordered_list_close = _on_bullet_list_close

    def _on_list_item_open(self, token: Token) -> None:
        self.marker = self.lists[-1].next_marker()

    def _on_list_item_close(self, token: Token) -> None:
        if self.marker:  # an empty item
            self._add_line(())

    def _on_inline(self, token: Token) -> None:
        spans = spans_of(token.children or [])
        if self.in_table:
            self.rows[-1].append(spans)
        else:
            self._add_line(self._with_box(spans))

    def _with_box(self, spans: tuple[TextSpan, ...]) -> tuple[TextSpan, ...]:
        first = spans[0] if spans and self.marker and self.lists else None
        if first is None or first.code or not (box := TASK.match(first.text)):
            return spans
        sign = "☐" if box[1] == " " else "☑"
        self.marker = sign if self.marker == "•" else f"{self.marker} {sign}"
        rest = replace(first, text=first.text[box.end() :])
        return (rest, *spans[1:]) if rest.text else spans[1:]

    def _on_formula_block(self, token: Token) -> None:
        self._flush_marker()
        formula: Formula = token.meta["formula"]
        self.pieces.append(DisplayFormula(formula, len(self.lists), self.quote))

    def _on_footnote_reference_open(self, token: Token) -> None:
        self.note = self.marker = str(token.meta["label"])

    def _on_footnote_reference_close(self, token: Token) -> None:
        self._flush_marker()
        self.note = ""

    def _add_line(self, spans: tuple[TextSpan, ...]) -> None:
        self.pieces.append(
            TextLine(
                spans,
                heading=self.heading,
                marker=self.marker,
                indent=len(self.lists),
                quote=self.quote,
                tight=self.hidden and bool(self.lists) and not self.opens_list,
                note=self.note,
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
