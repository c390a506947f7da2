"""Small parts of the server page: a switch with its words, a text to copy."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.widgets.buttons import IconButton
from app.widgets.controls import Switch
from app.widgets.text import label
from app.widgets.theme import set_role


class SwitchRow(QWidget):
    """A switch, its name, and a sentence on what it means.

    Attributes:
        below: what is shown under the sentence, from the top.
    """

    toggled = Signal(bool)  # by a person

    def __init__(self, title: str, help: str) -> None:  # noqa: A002 the word for it
        super().__init__()
        self._switch = Switch()
        self._switch.setAccessibleName(title)
        self._help = label(role="muted")
        self._help.setWordWrap(True)
        self.below = QVBoxLayout()
        self.below.setContentsMargins(0, 4, 0, 0)
        self.below.setSpacing(4)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(1, 1)
        grid.addWidget(self._switch, 0, 0, Qt.AlignmentFlag.AlignVCenter)
        grid.addWidget(label(title), 0, 1)
        grid.addWidget(self._help, 1, 1)
        grid.addLayout(self.below, 2, 1)
        self._switch.clicked.connect(self.toggled)
        self.set_help(help)

    @property
    def is_on(self) -> bool:
        """Whether the switch is on."""
        return self._switch.isChecked()

    def set_on(self, on: bool, *, is_locked: bool = False) -> None:
        """Show the switch on or off, without a signal.

        Args:
            is_locked: whether a person cannot change it.
        """
        self._switch.setChecked(on)
        self._switch.setEnabled(not is_locked)

    def set_help(self, text: str) -> None:
        """Say what the switch means."""
        self._help.setText(text)
        self._switch.setAccessibleDescription(text)

    @Slot()
    def press(self) -> None:
        """Press the switch."""
        self._switch.click()


class CopiedText(QWidget):
    """A text in one line that can be selected, with a button that copies it.

    Args:
        name: its name for screen readers.
        copy: words of the button.
    """

    def __init__(self, name: str, copy: str) -> None:
        super().__init__()
        self.edit = QLineEdit(readOnly=True)
        self.edit.setAccessibleName(name)
        self.copy_button = IconButton("copy", copy, size=16)
        self.copy_button.clicked.connect(self.copy)
        self.row = QHBoxLayout(self)
        self.row.setContentsMargins(0, 0, 0, 0)
        self.row.setSpacing(4)
        self.row.addWidget(self.edit, 1)
        self.row.addWidget(self.copy_button)

    def set_text(self, text: str) -> None:
        """Show a text from its beginning."""
        if text != self.edit.text():
            self.edit.setText(text)
            self.edit.setCursorPosition(0)

    @Slot()
    def copy(self) -> None:
        """Put the text into the clipboard."""
        QGuiApplication.clipboard().setText(self.edit.text())


class ExampleText(QFrame):
    """Lines for a terminal that can be selected, with a button that copies them.

    Args:
        copy: words of the button.
    """

    def __init__(self, copy: str) -> None:
        super().__init__()
        set_role(self, "code")
        self._text = label(role="muted")
        self._text.setWordWrap(True)
        self._text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.copy_button = IconButton("copy", copy, size=16)
        self.copy_button.clicked.connect(self.copy)
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 6, 4, 6)
        row.addWidget(self._text, 1)
        row.addWidget(self.copy_button, 0, Qt.AlignmentFlag.AlignTop)

    def set_text(self, text: str) -> None:
        """Show other lines."""
        self._text.setText(text)

    @Slot()
    def copy(self) -> None:
        """Put the lines into the clipboard."""
        QGuiApplication.clipboard().setText(self._text.text())
