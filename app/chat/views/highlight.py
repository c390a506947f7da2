"""Syntax colours: pygments classifies the words, the theme gives each class a colour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from PySide6.QtGui import QColor, QFont, QTextCharFormat, QTextLayout

from app.chat.views.lexers import lexers, make_lexer
from app.widgets.theme import Theme

SUFFIX = re.compile(r"\*\.\w+")
MAX_CHARACTERS = 20_000  # a text that grows is coloured anew each time

Ranges = list[QTextLayout.FormatRange]


def highlight(code: str, language: str, colours: Theme) -> Iterator[Ranges]:
    """Return the formats of one line of `code` after the other.

    There are none for a long text or for a language whose lexer is not there, see `lexers`.
    """
    lexer = lexers().find(language.lower()) if len(code) <= MAX_CHARACTERS else None
    if lexer is None:
        yield from ([] for _ in range(code.count("\n") + 1))
        return
    styles = _styles(colours)
    line: Ranges = []
    column = 0
    for _, kind, text in lexer.get_tokens_unprocessed(code):
        style = styles.get(_family(str(kind)))
        for index, part in enumerate(text.split("\n")):
            if index:
                yield line
                line, column = [], 0
            if style is not None and part.strip():
                line.append(_range(column, len(part), style))
            column += len(part)
    yield line


def suffix_of(language: str) -> str:
    """Return the usual suffix of files in a language, such as ".py"; ".txt" for an unknown one."""
    lexer = make_lexer(language.lower())
    names = lexer.filenames if lexer is not None else []
    return next((name[1:] for name in names if SUFFIX.fullmatch(name)), ".txt")


FAMILIES = (
    "Comment", "Keyword", "Literal.String", "Literal.Number", "Name.Function", "Name.Class",
    "Name.Decorator", "Name.Builtin", "Name.Tag", "Name.Attribute",
)  # fmt: skip


@cache
def _family(kind: str) -> str:
    name = kind.removeprefix("Token.")
    return next((family for family in FAMILIES if name.startswith(family)), "")


@cache
def _styles(colours: Theme) -> dict[str, QTextCharFormat]:
    comment = _style(colours.muted)
    comment.setFontItalic(True)
    keyword, name = _style(colours.accent), _style(colours.device_colour(3))
    string, number = _style(colours.ok), _style(colours.device_colour(1))
    return {
        "Comment": comment,
        "Keyword": keyword,
        "Literal.String": string,
        "Literal.Number": number,
        "Name.Function": name,
        "Name.Class": name,
        "Name.Decorator": name,
        "Name.Builtin": keyword,
        "Name.Tag": keyword,
        "Name.Attribute": number,
    }


def _style(colour: str) -> QTextCharFormat:
    style = QTextCharFormat()
    style.setForeground(QColor(colour))
    style.setFontWeight(QFont.Weight.Normal)
    return style


def _range(start: int, length: int, style: QTextCharFormat) -> QTextLayout.FormatRange:
    made = QTextLayout.FormatRange()
    made.start, made.length, made.format = start, length, style
    return made
