"""The frame of the dialogs of help: a title, a search where there is one, buttons below."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.theme import px


class PageDialog(QDialog):
    """Dialog that leaves the window usable, and closes by Esc.

    Attributes:
        head: row above the contents.
        foot: row of buttons, with one that closes.
    """

    def __init__(self, title: str, parent: QWidget, size: tuple[int, int]) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setModal(False)
        screen = parent.screen().availableSize()
        self.resize(min(px(size[0]), screen.width()), min(px(size[1]), screen.height()))
        self.head, self.foot = QHBoxLayout(), QHBoxLayout()
        close = button(tr("Close"))
        close.clicked.connect(self.close)
        close.setAutoDefault(False)
        self.foot.addStretch()
        self.foot.addWidget(close)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(20, 16, 20, 16)
        self.column.setSpacing(10)
        self.column.addLayout(self.head)
        self.column.addLayout(self.foot)

    def set_content(self, content: QWidget) -> None:
        """Put the contents between the rows."""
        self.column.insertWidget(1, content, 1)

    def appear(self) -> None:
        """Show the dialog in front."""
        self.show()
        self.raise_()
        self.activateWindow()


def search_field(text: str) -> QLineEdit:
    """Return a field for words to search for."""
    field = QLineEdit()
    field.setPlaceholderText(text)
    field.setAccessibleName(text)
    field.setClearButtonEnabled(True)
    return field


def plain_page(name: str) -> QPlainTextEdit:
    """Return a page of text to read and copy, named for screen readers."""
    page = QPlainTextEdit()
    page.setReadOnly(True)
    page.setAccessibleName(name)
    page.setTabChangesFocus(True)
    page.setLineWrapMode(QPlainTextEdit.LineWrapMode.WidgetWidth)
    page.setTextInteractionFlags(
        Qt.TextInteractionFlag.TextSelectableByMouse
        | Qt.TextInteractionFlag.TextSelectableByKeyboard
    )
    return page
