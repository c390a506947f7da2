"""Text in the window, always shown as plain text.

Qt would render text that looks like HTML and load its images. `tests/test_structure.py` checks that
all other modules use this one to create text widgets and tooltips.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from PySide6.QtCore import QPoint, QSize, QStandardPaths, Qt, QUrl
from PySide6.QtGui import QAction, QDesktopServices, QResizeEvent, QStandardItem, QTextCharFormat
from PySide6.QtWidgets import (
    QFileDialog,
    QLabel,
    QListWidgetItem,
    QSizePolicy,
    QSystemTrayIcon,
    QToolTip,
    QWidget,
)

from engine import one_line, printable

MAX_TIP: Final = 2000  # maximum number of characters in a tooltip

MAX_CAPTION: Final = 80  # maximum number of characters in a button or menu entry


class PlainLabel(QLabel):
    """Label that never renders HTML."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)

    def setText(self, text: str) -> None:  # noqa: N802 Qt
        super().setText(printable(text))


def label(text: str = "", role: str | None = None) -> PlainLabel:
    """Return a label with a style sheet role."""
    result = PlainLabel(text)
    if role:
        result.setProperty("role", role)
    return result


class ElidedLabel(PlainLabel):
    """A label that elides its text; the tooltip shows the full text."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent=parent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self._full = ""
        self.set_full_text(text)

    def set_full_text(self, text: str) -> None:
        text = printable(text)
        if text == self._full:
            return
        self._full = text
        self.setAccessibleName(text)
        self._elide()

    def _elide(self) -> None:
        shown = self.shortened(self._full)
        set_tip(self, self._full if shown != self._full else "")
        self.setText(shown)

    def shortened(self, text: str) -> str:
        """Return `text` elided to the label's width."""
        return self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, self.width())

    def minimumSizeHint(self) -> QSize:
        return QSize(24, super().minimumSizeHint().height())

    def sizeHint(self) -> QSize:
        width = self.fontMetrics().horizontalAdvance(self._full) + 2
        return QSize(width, super().sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._elide()


class Sign(NamedTuple):
    """A coloured symbol and the words that follow it."""

    colour: str
    text: str
    words: str = ""


class LegendLabel(QLabel):
    """Label with coloured symbols and words; the words are never rendered as HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.RichText)
        self.setProperty("role", "muted")

    def set_signs(self, signs: Sequence[Sign], end: str = "") -> None:
        """Show signs, followed by `end`."""
        texts = [
            f'<span style="color:{escape(sign.colour)}">{escape(printable(sign.text))}</span>'
            + f"&nbsp;{escape(printable(sign.words))}" * bool(sign.words)
            for sign in signs
        ]
        shown = f"{'&nbsp;&nbsp; '.join(texts)} {escape(printable(end))}".strip()
        self.setText(shown.replace("\N{NO-BREAK SPACE}", "&nbsp;"))


TipTarget = QWidget | QAction | QStandardItem | QListWidgetItem | QSystemTrayIcon | QTextCharFormat


def set_tip(target: TipTarget, text: str) -> None:
    """Set a plain-text tooltip."""
    target.setToolTip(plain_tip(text))


def show_tip(widget: QWidget, place: QPoint, text: str) -> None:
    """Show a plain-text tooltip at a point on the screen."""
    QToolTip.showText(place, plain_tip(text), widget)


class TrayIcon(QSystemTrayIcon):
    """System tray icon; its messages contain no markup."""

    def say(self, text: str) -> None:
        """Show a desktop notification, escaped because some desktops render markup."""
        plain = one_line(text).translate({ord("<"): "‹", ord(">"): "›", ord("&"): "+"})
        self.showMessage("Tandem", plain, self.icon())


def plain_tip(text: str) -> str:
    """Return `text` escaped for a tooltip."""
    shown = printable(text[:MAX_TIP]).strip()
    if "<" not in shown and "&" not in shown:
        return shown
    return f'<p style="white-space:pre-wrap">{escape(shown)}</p>'


def caption_text(text: str, most: int = MAX_CAPTION) -> str:
    """Return `text` as one line, escaped for a button or menu.

    Qt treats "&" as a mnemonic marker, and a tab in a menu entry as the start of a shortcut.

    Args:
        most: maximum number of characters, as in `one_line`.
    """
    return one_line(text, most).replace("&", "&&")


def row_item(text: str, tip: str = "") -> QStandardItem:
    """Return a table cell."""
    item = QStandardItem(one_line(text))
    set_tip(item, tip)
    return item


def list_item(text: str, tip: str = "") -> QListWidgetItem:
    """Return a list entry."""
    item = QListWidgetItem(one_line(text))
    set_tip(item, tip)
    return item


def unbroken(text: str) -> str:
    """Return `text` with no line breaks allowed between numbers and "tok/s"."""
    return text.replace(" tok/s", "\N{NO-BREAK SPACE}tok/\N{WORD JOINER}s")


def html_text(text: str) -> str:
    """Return `text` escaped for HTML, for example in graph axes."""
    return escape(one_line(text))


_last_folder: Path | None = None


def reveal(path: str | Path) -> None:
    """Open a file's folder in the file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(Path(path).parent)))


def ask_where_to_save(over: QWidget, title: str, name: str, kinds: str = "") -> tuple[str, str]:
    """Ask for a file to write; return its path ("" if cancelled) and the chosen filter.

    Args:
        name: suggested name, in the last file's folder or the user's documents folder.
        kinds: filters, as in `QFileDialog`.
    """
    global _last_folder
    place = str(_folder() / name)
    chosen, kind = QFileDialog.getSaveFileName(over, title, place, kinds)
    if chosen:
        _last_folder = Path(chosen).parent
    return chosen, kind


def _folder() -> Path:
    documents = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation)
    folders = (_last_folder, Path(documents) if documents else None)
    return next((folder for folder in folders if folder and folder.is_dir()), Path.home())
