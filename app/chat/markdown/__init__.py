"""A Markdown parser for views, which render pieces of text without HTML.

The dialect is CommonMark with tables, strikethrough, task lists, footnotes, bare URLs and formulas.
HTML and link reference definitions are shown as text, images as their description and URL, and
footnotes in place. Top-level blocks are therefore independent, which makes streaming exact; see
`MarkdownStream`.
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
