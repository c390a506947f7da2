"""A Markdown parser for views that write pieces of text and never touch HTML.

The dialect is CommonMark with tables, strikethrough, task boxes, footnotes, bare web addresses and
formulas. HTML stays text, images become their description and address, and link reference
definitions stay text, too, so that every top-level block means the same on its own; a footnote
stays where it was written. That makes streaming exact: see `MarkdownStream`.
"""

from app.chat.markdown.cutting import Portion, portions
from app.chat.markdown.delimiters import Formula, formula_rules
from app.chat.markdown.parsing import MarkdownStream, normal, parse
from app.chat.markdown.pieces import (
    CodeBlock,
    DisplayFormula,
    Piece,
    Rule,
    Table,
    TextLine,
    TextSpan,
    opened_address,
)

__all__ = [
    "CodeBlock",
    "DisplayFormula",
    "Formula",
    "MarkdownStream",
    "Piece",
    "Portion",
    "Rule",
    "Table",
    "TextLine",
    "TextSpan",
    "formula_rules",
    "normal",
    "opened_address",
    "parse",
    "portions",
]
