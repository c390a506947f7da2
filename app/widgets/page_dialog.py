"""Frame for help dialogs: a row at the top, contents, buttons below."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.layout import fill
from app.widgets.theme import px


class PageDialog(QDialog):
    """Non-modal dialog with rows above (`head`) and below (`foot`) its contents."""

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
        fill(self.foot, None, close)
        self.column = QVBoxLayout(self)
        fill(self.column, self.head, self.foot, margins=(20, 16, 20, 16), spacing=10)

    def set_content(self, content: QWidget) -> None:
        """Insert the contents between the rows."""
        self.column.insertWidget(1, content, 1)

    def appear(self) -> None:
        """Show the dialog in front of other windows."""
        self.show()
        self.raise_()
        self.activateWindow()


def search_field(text: str) -> QLineEdit:
    """Return a search field."""
    field = QLineEdit()
    field.setPlaceholderText(text)
    field.setAccessibleName(text)
    field.setClearButtonEnabled(True)
    return field


def plain_page(name: str) -> QPlainTextEdit:
    """Return a read-only text page, named for screen readers."""
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
