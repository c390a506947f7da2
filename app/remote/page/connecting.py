"""The connection dialog for remote models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from PySide6.QtCore import QModelIndex, QObject, Qt, Signal, Slot
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

from app.core.background import LatestJob
from app.core.notice import Notice, secret_notice
from app.core.settings import Settings, SettingsStore
from app.core.system_keyring import Place
from app.core.translation import error_text, tr, tr_n
from app.core.units import context_text
from app.remote.client.address import EXAMPLE, KeyStore, RemoteAddress, cleaned_key, parse_url
from app.remote.client.connection import Connection
from app.remote.client.protocol import ListedModel, list_models
from app.widgets.buttons import button
from app.widgets.text import label, row_item
from app.widgets.theme import set_role
from engine import Cancelled, EngineError

NAME = Qt.ItemDataRole.UserRole


class RemoteDialog(QDialog):
    """Dialog for a server, its key and one of its models; saved keys are never shown.

    Attributes:
        address: field for the server, which lists recent servers.
        warning: security warning about the address.
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
        self.address.setAccessibleName(tr("Server address"))
        line = self.address.lineEdit()
        assert line is not None, "an editable box has one"
        line.setPlaceholderText(EXAMPLE)
        self.key = QLineEdit()
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.key.setAccessibleName(tr("API key"))
        self._rows = QStandardItemModel(0, 1, self)
        self.models = QListView()
        self.models.setModel(self._rows)
        self.models.setAccessibleName(tr("Models on the server"))
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
        """Name of the selected model, or ""."""
        index = self.models.currentIndex()
        return str(index.data(NAME)) if index.isValid() else ""

    def show_key(self, *, is_kept: bool) -> None:
        """Show whether a key is saved for this server."""
        text = tr("Only if the server requires one")
        self.key.setPlaceholderText(
            tr("A key is saved. Leave empty to use it.") if is_kept else text
        )

    def show_models(self, models: Sequence[ListedModel]) -> None:
        """Show a server's models and select the first."""
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
        """Show a message below the list."""
        set_role(self.status, "danger" if is_error else "muted")
        self.status.setText(text)
        self.list_.setEnabled(not is_busy)

    def show_warning(self, text: str) -> None:
        """Show a warning below the key, or hide it if the text is ""."""
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
                "Another machine generates the answers with “tandem serve” or any OpenAI-compatible"
                " server. It receives what you write in chats with it, including system prompts and"
                " attached files."
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


class RemoteConnecting(QObject):
    """The connection dialog, with its requests to servers and the keyring.

    Args:
        over: parent for the dialog.
        keep: saves settings.
    """

    noticed = Signal(object)  # Notice
    open_requested = Signal(str)  # address of a model

    def __init__(
        self,
        keys: KeyStore,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        over: QWidget,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._keys, self._settings, self._keep = keys, settings, keep
        self._over = over
        self.dialog: RemoteDialog | None = None
        self._connection: Connection | None = None
        self._listed: RemoteAddress | None = None  # the server whose models are shown
        self._lister = LatestJob("tandem-remote-list", self)
        self._lister.done.connect(self._on_listed)
        self._lister.failed.connect(self._on_failed)
        self._keeper = LatestJob("tandem-remote-key", self)
        self._keeper.done.connect(self._on_kept)
        self._keeper.failed.connect(lambda error: self.noticed.emit(Notice.of(error)))

    @Slot()
    def open(self) -> None:
        dialog = self.dialog = RemoteDialog(self._settings.current.servers, self._over)
        dialog.edited.connect(self._on_edited)
        dialog.list_requested.connect(self._list)
        dialog.chosen.connect(self._connect)
        dialog.forget_requested.connect(self._forget)
        dialog.finished.connect(self._on_closed)
        self._on_edited()
        dialog.open()

    def close(self) -> None:
        """Stop all work on threads."""
        self._abort()
        self._lister.close()
        self._keeper.close()

    def _abort(self) -> None:
        self._lister.drop()
        if self._connection is not None:
            self._connection.abort()

    def _address(self) -> RemoteAddress | None:
        assert self.dialog is not None
        try:
            return parse_url(self.dialog.address.currentText())
        except EngineError:
            return None

    @Slot()
    def _on_edited(self) -> None:
        if self.dialog is None:
            return
        dialog, address = self.dialog, self._address()
        is_kept = address is not None and self._keys.has(address)
        has_key = is_kept or bool(dialog.key.text().strip())
        dialog.show_key(is_kept=is_kept)
        is_open = address is not None and address.is_in_the_open
        warning = tr("Without https, others on the network can read your messages.")
        if has_key:
            warning = tr("Without https, others on the network can read your messages and the key.")
        dialog.show_warning(warning if is_open else "")
        is_known = address is not None and address.url in self._settings.current.servers
        dialog.forget.setVisible(is_known or is_kept)
        if self._listed is not None and address != self._listed:
            self._abort()
            self._listed = None
            dialog.show_models(())
            dialog.show_status("")

    @Slot()
    def _list(self) -> None:
        assert self.dialog is not None
        self._abort()
        try:
            address = parse_url(self.dialog.address.currentText())
            typed = cleaned_key(self.dialog.key.text())
        except EngineError as error:
            self._on_failed(error)
            return
        self._listed = address
        self.dialog.show_models(())
        text = tr("Connecting to {host} …").format(host=address.host)
        self.dialog.show_status(text, is_busy=True)

        connection = self._connection = Connection(address, typed)

        def ask() -> list[ListedModel]:
            connection.key = typed or self._keys.get(address)
            return list_models(address, connection)

        self._lister.run(ask)

    @Slot(object)
    def _on_listed(self, models: list[ListedModel]) -> None:
        if self.dialog is None:
            return
        self.dialog.show_models(models)
        n = len(models)
        text = tr_n("{n} model", "{n} models", n) if n else tr("This server has no models.")
        self.dialog.show_status(text, is_error=not n)

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if self.dialog is not None and not isinstance(error, Cancelled):
            self.dialog.show_models(())
            self.dialog.show_status(error_text(error), is_error=True)

    @Slot(str)
    def _connect(self, model: str) -> None:
        assert self.dialog is not None
        address, typed = self._listed, self.dialog.key.text()
        if address is None:
            return
        self._keep(self._settings.current.with_server(address.url))
        path = replace(address, model=model).path
        self.dialog.accept()
        if not typed.strip():
            self.open_requested.emit(path)
            return
        self._keeper.run(lambda: (path, self._keys.put(address, typed)))

    @Slot(object)
    def _on_kept(self, kept: tuple[str, Place]) -> None:
        path, place = kept
        if (path or place == "file") and (notice := secret_notice(place)):
            self.noticed.emit(notice)
        if path:
            self.open_requested.emit(path)

    @Slot()
    def _forget(self) -> None:
        assert self.dialog is not None
        address = self._address()
        if address is None:
            return
        current = self._settings.current
        servers = tuple(url for url in current.servers if url != address.url)
        recent = tuple(
            path for path in current.recent_models if not path.startswith(f"{address.url}#")
        )
        self._keep(replace(current, servers=servers, recent_models=recent))
        self._keeper.run(lambda: ("", self._keys.put(address, "")))
        self.dialog.address.removeItem(self.dialog.address.findText(address.url))
        self.dialog.address.setCurrentText("")
        self.dialog.key.clear()

    @Slot()
    def _on_closed(self) -> None:
        self._abort()
        dialog, self.dialog, self._listed = self.dialog, None, None
        if dialog is not None:
            dialog.key.clear()
            dialog.deleteLater()
