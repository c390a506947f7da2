"""The pieces that a text in Markdown is made of."""

from __future__ import annotations

from dataclasses import dataclass

from app.chat.markdown.delimiters import Formula


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A run of text in one style.

    Attributes:
        href: http(s) address or "".
        note: label of the footnote that the text refers to, or "".
        formula: formula whose source the text is.
    """

    text: str
    bold: bool = False
    italic: bool = False
    code: bool = False
    strike: bool = False
    href: str = ""
    note: str = ""
    formula: Formula | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the run has the style of its line."""
        return not (
            self.bold or self.italic or self.code or self.strike or self.href or self.note
            or self.formula
        )  # fmt: skip


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
        note: label of the footnote that the line belongs to; "" for other lines.
    """

    spans: tuple[TextSpan, ...]
    heading: int = 0
    marker: str = ""
    indent: int = 0
    quote: int = 0
    tight: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A code block; `language` is the word after the fence, may be ""."""

    text: str
    language: str = ""


Rows = tuple[tuple[tuple[TextSpan, ...], ...], ...]
"""Rows of cells."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: rows of cells, header first; `aligns` has "left", "center" or "right" per column."""

    rows: Rows
    aligns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line."""


@dataclass(frozen=True, slots=True)
class DisplayFormula:
    """A formula in a line of its own; `indent` and `quote` are those of a `TextLine`."""

    formula: Formula
    indent: int = 0
    quote: int = 0


Piece = TextLine | CodeBlock | Table | Rule | DisplayFormula
