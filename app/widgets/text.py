"""Text in the window: whatever words come from files and models, they are shown as plain text.

Qt takes a text that looks like HTML for HTML, and would load the pictures in it. What shows words
is made here; `tests/test_structure.py` finds widgets that are made past this module.
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

MAX_TIP: Final = 2000
"""Largest number of characters of a tool tip."""

MAX_CAPTION: Final = 80
"""Largest number of characters of a button or a line of a menu."""


class PlainLabel(QLabel):
    """Label that shows its text as it is, without HTML."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)

    def setText(self, text: str) -> None:  # noqa: N802 Qt
        super().setText(printable(text))


def label(text: str = "", role: str | None = None) -> PlainLabel:
    """Return a label in a role of the style sheet."""
    result = PlainLabel(text)
    if role:
        result.setProperty("role", role)
    return result


class ElidedLabel(PlainLabel):
    """A label that ends in "…" if its text does not fit; the tool tip has the whole text."""

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
        """Return as much of a text as fits."""
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
    """A sign in a colour of its own, and the words behind it."""

    colour: str
    text: str
    words: str = ""


class LegendLabel(QLabel):
    """Label of signs in colours, with words; these are never read as HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.RichText)
        self.setProperty("role", "muted")

    def set_signs(self, signs: Sequence[Sign], end: str = "") -> None:
        """Show signs with gaps between them.

        Args:
            end: words behind the last sign.
        """
        texts = [
            f'<span style="color:{escape(sign.colour)}">{escape(printable(sign.text))}</span>'
            + f"&nbsp;{escape(printable(sign.words))}" * bool(sign.words)
            for sign in signs
        ]
        shown = f"{'&nbsp;&nbsp; '.join(texts)} {escape(printable(end))}".strip()
        self.setText(shown.replace("\N{NO-BREAK SPACE}", "&nbsp;"))


TipTarget = QWidget | QAction | QStandardItem | QListWidgetItem | QSystemTrayIcon | QTextCharFormat
"""What can have a tool tip."""


def set_tip(target: TipTarget, text: str) -> None:
    """Set a tool tip, which shows `text` as it is."""
    target.setToolTip(plain_tip(text))


def show_tip(widget: QWidget, place: QPoint, text: str) -> None:
    """Show a tool tip now, at a place of the screen; it shows `text` as it is."""
    QToolTip.showText(place, plain_tip(text), widget)


class TrayIcon(QSystemTrayIcon):
    """Icon in the desktop's tray, whose messages have no markup."""

    def say(self, text: str) -> None:
        """Show a message of the desktop's; some desktops would take "<b>" in it for markup."""
        plain = one_line(text).translate({ord("<"): "‹", ord(">"): "›", ord("&"): "+"})
        self.showMessage("Tandem", plain, self.icon())


def plain_tip(text: str) -> str:
    """Return what Qt has to be given as a tool tip so that it shows `text` as it is."""
    shown = printable(text[:MAX_TIP]).strip()
    if "<" not in shown and "&" not in shown:
        return shown
    return f'<p style="white-space:pre-wrap">{escape(shown)}</p>'


def caption_text(text: str, most: int = MAX_CAPTION) -> str:
    """Return what a button or a menu has to be given so that it shows `text`, in one line.

    Qt takes "&" for the mark of a key, and in menus a tab for the beginning of one.

    Args:
        most: largest number of characters that are shown, as in `one_line`.
    """
    return one_line(text, most).replace("&", "&&")


def row_item(text: str, tip: str = "") -> QStandardItem:
    """Return the cell of a table."""
    item = QStandardItem(one_line(text))
    set_tip(item, tip)
    return item


def list_item(text: str, tip: str = "") -> QListWidgetItem:
    """Return the line of a list."""
    item = QListWidgetItem(one_line(text))
    set_tip(item, tip)
    return item


def unbroken(text: str) -> str:
    """Return a text of several lines in which no speed is broken, at its slash or before it."""
    return text.replace(" tok/s", "\N{NO-BREAK SPACE}tok/\N{WORD JOINER}s")


def html_text(text: str) -> str:
    """Return what shows `text` as it is where HTML is expected, as in the axes of graphs."""
    return escape(one_line(text))


_last_folder: Path | None = None


def reveal(path: str | Path) -> None:
    """Open the folder of a file in the file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(Path(path).parent)))


def ask_where_to_save(over: QWidget, title: str, name: str, kinds: str = "") -> tuple[str, str]:
    """Ask for a file to write; return its path and the chosen kind, "" for none.

    Args:
        name: proposed name of the file. It is proposed in the folder of the last file, at first
            among the documents: a program's working folder may be anywhere.
        kinds: kinds of files, as of `QFileDialog`.
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
