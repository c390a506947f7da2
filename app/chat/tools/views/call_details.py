"""The arguments and the result of a call, whole and as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from PySide6.QtWidgets import QPlainTextEdit, QVBoxLayout, QWidget

from app.chat.markdown import TextLine, TextSpan
from app.chat.tools.tool_use import ToolUse, read_arguments
from app.chat.views.prose_view import ProseView
from app.core.translation import tr
from app.widgets.sizes import scaled
from app.widgets.text import label
from engine import one_line, printable

MOST_NAMED: Final = 24
"""Largest number of arguments that are shown by themselves; more are shown as one JSON text."""

MOST_WHOLE: Final = 4000
"""Largest number of characters of a text that is as high as it needs; a longer one scrolls."""

MOST_HEIGHT: Final = 240
"""Height of a text that scrolls, in pixels."""


class CallDetails(QWidget):
    """Names and values of the arguments, and the result if there is one.

    Each value has a view of its own, so that no text in it can pass for another argument.
    """

    def __init__(self, call: ToolUse, parent: QWidget) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 0, 0, 4)
        column.setSpacing(2)
        for name, text in _parts(call):
            heading = label(one_line(name, 200), "muted")
            heading.setWordWrap(True)
            column.addWidget(heading)
            if text:
                column.addWidget(_text_view(text, name, self))


def _parts(call: ToolUse) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of what is shown."""
    arguments = read_arguments(call.arguments)
    if arguments is None or len(arguments) > MOST_NAMED:
        text = call.arguments if arguments is None else _as_text(arguments)
        yield tr("Arguments"), text
    elif not arguments:
        yield tr("No arguments"), ""
    else:
        for name, value in arguments.items():
            yield name, _as_text(value)
    if call.result:
        yield tr("Result"), call.result.rstrip()


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False, indent=2)


def _text_view(text: str, name: str, parent: QWidget) -> QWidget:
    if len(text) <= MOST_WHOLE:
        prose = ProseView(parent)
        prose.setAccessibleName(one_line(name, 200))
        prose.write([TextLine((TextSpan(text),))])
        return prose
    edit = QPlainTextEdit(parent, readOnly=True)
    edit.setAccessibleName(one_line(name, 200))
    edit.setPlainText(printable(text))
    scaled(edit, edit.setFixedHeight, MOST_HEIGHT)
    return edit
