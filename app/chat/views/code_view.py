"""The view of a code block: language, buttons, and highlighted text, which may grow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt, QTimer, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QResizeEvent,
    QTextCharFormat,
    QTextCursor,
    QTextLayout,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QHBoxLayout,
    QPlainTextEdit,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.chat.markdown import CodeBlock, Piece
from app.chat.views.prose_view import MONOSPACE
from app.core.process.spare_time import spare_time, take_step
from app.core.translation import reason_of, tr
from app.widgets.buttons import button
from app.widgets.layout import fit_height
from app.widgets.text import ask_where_to_save, label
from app.widgets.theme import Theme, px, theme
from engine import one_line, printable

if TYPE_CHECKING:
    from pygments.lexer import Lexer


class Lexers(QObject):
    """Cache of lexers, which are created by threads."""

    ready = Signal(str)  # language whose lexer is now cached, or does not exist

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Lexer | None] = {}
        self._threads: dict[str, threading.Thread] = {}

    def find(self, language: str) -> Lexer | None:
        """Return the cached lexer for a language, if any."""
        return self._made.get(language)

    def want(self, language: str) -> bool:
        """Create a lexer; return whether `ready` will report it."""
        if not language or language in self._made:
            return False
        if language not in self._threads:
            thread = threading.Thread(target=self._make, args=(language,), daemon=True)
            self._threads[language] = thread
            thread.start()
        return True

    def finish(self) -> None:
        """Wait until all requested lexers have been created."""
        for thread in self._threads.values():
            thread.join()

    def _make(self, language: str) -> None:
        self._made[language] = make_lexer(language)
        self.ready.emit(language)


@cache
def lexers() -> Lexers:
    """Return this process's lexer cache."""
    return Lexers()


@cache
def make_lexer(language: str) -> Lexer | None:
    """Return a lexer for a language (in lower case); None if Pygments has none."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None


SUFFIX = re.compile(r"\*\.\w+")
MAX_CHARACTERS = 20_000  # a growing text is highlighted repeatedly

Ranges = list[QTextLayout.FormatRange]


def highlight(code: str, language: str, colours: Theme) -> Iterator[Ranges]:
    """Yield each line's formats; none if the text is too long or the language's lexer is not
    cached."""
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
    """Return the file suffix for a language, such as ".py"; ".txt" if unknown."""
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


CODE_PIXELS = 13
COPIED_MS = 1500

COLOURED_AT_ONCE_S = 0.004
"""Maximum CPU time for highlighting before a growing text is painted; the rest follows later."""

MAX_TITLE = 40  # characters
MAX_PROBLEM = 80  # characters

MIN_WIDTH, SAVE_WIDTH, WRAP_WIDTH = 100, 260, 330
"""Minimum widths in pixels: of a block, and of blocks that show the Save or Wrap button."""


class CodeView(QFrame):
    """View of a `CodeBlock`; given a longer version, `set_code` updates only the new lines."""

    def __init__(self, code: CodeBlock, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "code")
        self.setMinimumWidth(MIN_WIDTH)
        self._language = label(_title(code), "muted")
        self._copy = button(tr("Copy"), "quiet", tr("Copy code"))
        self._copy.clicked.connect(self.copy)
        self._save = button(tr("Save as…"), "quiet", tr("Save code as a file"))
        self._save.clicked.connect(self.save)
        self._wrap = button(tr("Wrap"), "quiet", tr("Wrap long lines"))
        self._wrap.setCheckable(True)
        self._wrap.toggled.connect(self.wrap)
        self._problem = label("", "danger")
        self._copied = QTimer(self, singleShot=True, interval=COPIED_MS)
        self._copied.timeout.connect(self._offer_again)
        self._text = _CodeText(self)
        self._text.setAccessibleName(_spoken(code))
        self._shown = CodeBlock("")
        self._formats: list[Ranges] = []
        self._waits = False  # whether it waits for a lexer
        self._is_colouring = False

        header = QHBoxLayout()
        header.setContentsMargins(12, 2, 4, 0)
        header.addWidget(self._language)
        header.addStretch()
        for part in (self._problem, self._wrap, self._save, self._copy):
            header.addWidget(part)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 8)
        layout.setSpacing(0)
        layout.addLayout(header)
        layout.addWidget(self._text)
        self._text.raise_()  # makes screen readers read it after the header
        self.set_code(code)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._wrap.setVisible(self.width() >= WRAP_WIDTH)
        self._save.setVisible(self.width() >= SAVE_WIDTH)

    @property
    def plain_text(self) -> str:
        """The code."""
        return self._shown.text

    def take(self, piece: Piece) -> bool:
        """Show another version of the code; return False if it needs another view."""
        if not isinstance(piece, CodeBlock):
            return False
        self.set_code(piece)
        return True

    def set_code(self, code: CodeBlock) -> None:
        if code == self._shown:
            return
        if code.language != self._shown.language:
            self._language.setText(_title(code))
            self._formats = []
        first = self._write(code.text)
        self._shown = code
        language = code.language.lower()
        if not self._waits:
            lexers().ready.connect(self._on_lexer)  # before `want`, so as not to miss it
            self._waits = True
        if not lexers().want(language):
            lexers().ready.disconnect(self._on_lexer)
            self._waits = False
            self._show_colours()
        self._text.measure(first)

    @Slot()
    def copy(self) -> None:
        QApplication.clipboard().setText(self.plain_text)
        self._copy.setText(tr("Copied"))
        self._copied.start()

    @Slot()
    def save(self) -> None:
        """Ask for a file name and save the code."""
        name = f"code{suffix_of(self._shown.language)}"
        chosen, _ = ask_where_to_save(self, tr("Save code"), name)
        if not chosen:
            return
        try:
            Path(chosen).write_text(self.plain_text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            why = tr("Not saved: {reason}").format(reason=reason_of(error))
            self._problem.setText(one_line(why, MAX_PROBLEM))
        else:
            self._problem.setText("")
            self._save.setText(tr("Saved"))
            self._copied.start()

    @Slot(bool)
    def wrap(self, wrapped: bool) -> None:
        """Set whether long lines are wrapped rather than scrolled."""
        self._text.set_wrapped(wrapped)

    @Slot()
    def _offer_again(self) -> None:
        self._copy.setText(tr("Copy"))
        self._save.setText(tr("Save as…"))

    def _write(self, text: str) -> int:
        old = self._shown.text
        if not text.startswith(old):
            self._text.setPlainText(printable(text))
            self._formats = []
            return 0
        last = self._text.blockCount() - 1
        cursor = QTextCursor(self._text.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.insertText(printable(text[len(old) :]))
        return last

    @Slot(str)
    def _on_lexer(self, language: str) -> None:
        if self._waits and language == self._shown.language.lower():
            self._waits = False
            lexers().ready.disconnect(self._on_lexer)
            self._show_colours()

    def _show_colours(self) -> None:
        if self._is_colouring:
            return
        self._is_colouring = True
        work = self._colour()
        until = time.thread_time() + COLOURED_AT_ONCE_S
        while self.isVisible() and time.thread_time() < until:
            if not take_step(work):
                return
        spare_time().do(self, work)

    def _colour(self) -> Iterator[None]:
        shown = None
        while shown is not self._shown:
            shown = self._shown
            for number, ranges in enumerate(highlight(shown.text, shown.language, theme())):
                self._colour_line(number, ranges)
                yield
                if not self._shown.text.startswith(shown.text):
                    break
        self._is_colouring = False

    def _colour_line(self, number: int, ranges: Ranges) -> None:
        formats = self._formats
        if number < len(formats) - 1 and formats[number] == ranges:
            return
        formats[number : number + 1] = [ranges]
        block = self._text.document().findBlockByNumber(number)
        if block.isValid() and (ranges or block.layout().formats()):
            block.layout().setFormats(ranges)
            self._text.document().markContentsDirty(block.position(), block.length())


def _title(code: CodeBlock) -> str:
    return one_line(code.language, MAX_TITLE) or tr("text")


def _spoken(code: CodeBlock) -> str:
    language = one_line(code.language, MAX_TITLE)
    return tr("Code, {language}").format(language=language) if language else tr("Code, plain text")


class _CodeText(QPlainTextEdit):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        font = QFont()
        font.setFamilies(MONOSPACE)
        font.setPixelSize(px(CODE_PIXELS))
        self.setFont(font)
        self.setProperty("role", "codeText")
        self.setReadOnly(True)
        self.setUndoRedoEnabled(False)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.document().setDocumentMargin(4)
        self.setTabStopDistance(4 * QFontMetrics(font).horizontalAdvance(" "))
        self._is_wrapped = False
        self._ends: list[float] = []  # bottom of each line, in pixels
        self.horizontalScrollBar().rangeChanged.connect(self._fit)

    def measure(self, first: int) -> None:
        # the lines from `first` on have changed; fallback fonts make some lines taller
        document = self.document()
        layout = document.documentLayout()
        del self._ends[first:]
        block = document.findBlockByNumber(len(self._ends))
        while block.isValid():
            end = self._ends[-1] if self._ends else 0.0
            self._ends.append(end + layout.blockBoundingRect(block).height())
            block = block.next()
        self._fit()

    def set_wrapped(self, wrapped: bool) -> None:
        self._is_wrapped = wrapped
        mode = QPlainTextEdit.LineWrapMode
        self.setLineWrapMode(mode.WidgetWidth if wrapped else mode.NoWrap)
        self.measure(0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._is_wrapped and event.size().width() != event.oldSize().width():
            self.measure(0)

    @Slot()
    def _fit(self) -> None:
        text = self._ends[-1] if self._ends else 0.0
        fit_height(self, ceil(text + 2 * self.document().documentMargin()))

    def wheelEvent(self, event: QWheelEvent) -> None:
        if event.angleDelta().x():
            super().wheelEvent(event)
        else:
            event.ignore()
