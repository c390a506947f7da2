"""The dialog for the token of a person's account."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.text import label


class TokenDialog(QDialog):
    """Asks for a token, which is never shown again."""

    entered = Signal(str)  # "" removes the one that is known

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Hugging Face token"))
        self.field = QLineEdit()
        self.field.setEchoMode(QLineEdit.EchoMode.Password)
        self.field.setAccessibleName(tr("Token"))
        text = label(
            tr(
                "Only gated and private models need one; make it on your account's settings page,"
                " with the right to read. It is kept in the system's keyring, and goes to the hub"
                " alone."
            ),
            "muted",
        )
        text.setWordWrap(True)
        self.keep = button(tr("Use"), "primary")
        self.keep.setDefault(True)
        self.keep.clicked.connect(lambda: self._end(self.field.text()))
        self.remove = button(tr("Remove the token"))
        self.remove.clicked.connect(lambda: self._end(""))
        cancel = button(tr("Cancel"))
        cancel.clicked.connect(self.reject)
        self.keep.setEnabled(False)
        self.field.textChanged.connect(lambda typed: self.keep.setEnabled(bool(typed.strip())))
        row = QHBoxLayout()
        row.addWidget(self.remove)
        row.addStretch(1)
        row.addWidget(cancel)
        row.addWidget(self.keep)
        layout = QVBoxLayout(self)
        layout.setSpacing(12)
        layout.addWidget(text)
        layout.addWidget(self.field)
        layout.addLayout(row)
        self.resize(460, self.sizeHint().height())

    def _end(self, token: str) -> None:
        self.field.clear()
        self.entered.emit(token)
        self.accept()
