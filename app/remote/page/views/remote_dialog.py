"""The dialog that finds a model on another machine."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Qt, Signal, Slot
from PySide6.QtGui import QStandardItemModel
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QLineEdit,
    QListView,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr
from app.core.units import context_text
from app.remote.client.address import EXAMPLE
from app.remote.client.models import ListedModel
from app.widgets.buttons import button
from app.widgets.text import label, row_item
from app.widgets.theme import set_role

NAME = Qt.ItemDataRole.UserRole


class RemoteDialog(QDialog):
    """Asks for a server, its key and one of its models; keys are never shown again.

    Attributes:
        address: field of the server, with those that were used before.
        key: field of the API key.
        models: list of the models, once they are known.
        status: what is being done, or what has failed.
        warning: what speaks against these entries.
    """

    edited = Signal()
    list_requested = Signal()
    chosen = Signal(str)  # name of a model
    forget_requested = Signal()

    def __init__(self, servers: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Remote model"))
        self.address = QComboBox(editable=True, insertPolicy=QComboBox.InsertPolicy.NoInsert)
        self.address.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.address.addItems(list(servers))
        self.address.setAccessibleName(tr("Address of the server"))
        line = self.address.lineEdit()
        assert line is not None, "an editable box has one"
        line.setPlaceholderText(EXAMPLE)
        self.key = QLineEdit()
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.key.setAccessibleName(tr("API key"))
        self._rows = QStandardItemModel(0, 1, self)
        self.models = QListView()
        self.models.setModel(self._rows)
        self.models.setAccessibleName(tr("Models of the server"))
        self.models.setEditTriggers(QListView.EditTrigger.NoEditTriggers)
        self.status, self.warning = label("", "muted"), label("", "muted")
        self._make_buttons()
        self._build()
        self.address.editTextChanged.connect(self.edited)
        self.key.textChanged.connect(self.edited)
        self.models.doubleClicked.connect(self._choose)
        selection = self.models.selectionModel()
        selection.selectionChanged.connect(lambda: self.connect_.setEnabled(bool(self.selected)))
        self.show_models(())

    @property
    def selected(self) -> str:
        """Name of the selected model; "" for none."""
        index = self.models.currentIndex()
        return str(index.data(NAME)) if index.isValid() else ""

    def show_key(self, *, is_kept: bool) -> None:
        """Show whether a key is kept for this server, which an empty field leaves as it is."""
        kept = tr("A key is kept. Leave this empty to use it.")
        self.key.setPlaceholderText(kept if is_kept else tr("Only if the server wants one"))

    def show_models(self, models: Sequence[ListedModel]) -> None:
        """Show the models of a server, the first one selected."""
        self._rows.clear()
        for model in models:
            size = tr("{context} context").format(context=context_text(model.n_ctx))
            text = f"{model.name} · {size}" if model.n_ctx else model.name
            item = row_item(text)
            item.setData(model.name, NAME)
            self._rows.appendRow(item)
        if models:
            self.models.setCurrentIndex(self._rows.index(0, 0))
            self.models.setFocus()
        self.connect_.setEnabled(bool(models))
        self.connect_.setDefault(bool(models))
        self.list_.setDefault(not models)

    def show_status(self, text: str, *, is_error: bool = False, is_busy: bool = False) -> None:
        """Show a sentence below the list."""
        set_role(self.status, "danger" if is_error else "muted")
        self.status.setText(text)
        self.list_.setEnabled(not is_busy)

    def show_warning(self, text: str) -> None:
        """Show a warning below the key; "" for none."""
        self.warning.setText(text)
        self.warning.setVisible(bool(text))

    def _make_buttons(self) -> None:
        self.list_ = button(tr("Show models"))
        self.list_.clicked.connect(self.list_requested)
        self.connect_ = button(tr("Connect"), "primary")
        self.connect_.clicked.connect(self._choose)
        self.forget = button(tr("Forget this server"), "quiet")
        self.forget.clicked.connect(self.forget_requested)
        self.cancel = button(tr("Cancel"))
        self.cancel.clicked.connect(self.reject)

    def _build(self) -> None:
        about = label(
            tr(
                "Another machine computes the answers: one with “tandem serve”, or any server with"
                " OpenAI's interface. It gets what you write in chats with it, and their system"
                " prompts and attached files."
            ),
            "muted",
        )
        for text in (about, self.status, self.warning):
            text.setWordWrap(True)
        set_role(self.warning, "warn")
        form = QFormLayout()
        form.setSpacing(8)
        form.addRow(tr("Address"), self.address)
        form.addRow(tr("API key"), self.key)
        form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        row = QHBoxLayout()
        for widget in (self.forget, None, self.cancel, self.list_, self.connect_):
            row.addStretch(1) if widget is None else row.addWidget(widget)
        layout = QVBoxLayout(self)
        layout.setSpacing(12)
        layout.addWidget(about)
        layout.addLayout(form)
        layout.addWidget(self.warning)
        layout.addWidget(self.models, 1)
        layout.addWidget(self.status)
        layout.addLayout(row)
        self.resize(560, 460)

    @Slot()
    @Slot(QModelIndex)
    def _choose(self) -> None:
        if self.selected:
            self.chosen.emit(self.selected)
