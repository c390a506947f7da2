"""The server page: switch, address, requests, access settings and an example."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QGuiApplication, QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.core.settings import Settings
from app.core.translation import error_text, tr, tr_n
from app.server.page.choices import pages_text, read_pages
from app.server.page.log_view import ClientSpeed, LogView
from app.server.page.request_table import RequestTable, rate_text
from app.widgets.buttons import Chip, IconButton, button
from app.widgets.controls import Switch, ignore_wheel, line, page_scroll, show_number
from app.widgets.text import caption_text, label, set_tip
from app.widgets.theme import set_role
from engine import EngineError, one_line


class SwitchRow(QWidget):
    """A switch with a title and an explanation; `below` is a layout underneath them."""

    toggled = Signal(bool)  # by the user

    def __init__(self, title: str, help: str) -> None:  # noqa: A002
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
        return self._switch.isChecked()

    def set_on(self, on: bool, *, is_locked: bool = False) -> None:
        """Set the switch without emitting a signal; `is_locked` disables it."""
        self._switch.setChecked(on)
        self._switch.setEnabled(not is_locked)

    def set_help(self, text: str) -> None:
        """Set the explanation."""
        self._help.setText(text)
        self._switch.setAccessibleDescription(text)

    @Slot()
    def press(self) -> None:
        self._switch.click()


class CopiedText(QWidget):
    """A line of selectable text with a copy button.

    Args:
        name: accessible name of the text.
        copy: tooltip of the button.
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
        """Set the text and scroll to its start."""
        if text != self.edit.text():
            self.edit.setText(text)
            self.edit.setCursorPosition(0)

    @Slot()
    def copy(self) -> None:
        """Copy the text to the clipboard."""
        QGuiApplication.clipboard().setText(self.edit.text())


class ExampleText(QFrame):
    """Terminal lines and a copy button with the tooltip `copy`."""

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
        self._text.setText(text)

    @Slot()
    def copy(self) -> None:
        """Copy the lines to the clipboard."""
        QGuiApplication.clipboard().setText(self._text.text())


class AccessSettings(QWidget):
    """Switches for the key, access from the network, and web pages."""

    chosen = Signal(str, object)  # name and value of a setting
    key_renewed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.needs_key = SwitchRow(tr("Require a key"), "")
        self.network = SwitchRow(
            tr("Reachable from the network"),
            tr(
                "Other machines can use the model with the key. The traffic is not encrypted, so"
                " only enable this on trusted networks."
            ),
        )
        self.for_pages = SwitchRow(
            tr("Allow web pages (CORS)"),
            tr("Web pages in a browser can use the model. Otherwise, only programs can."),
        )
        self.key = CopiedText(tr("Key"), tr("Copy the key"))
        self.key.edit.setEchoMode(QLineEdit.EchoMode.Password)
        self.show_key = button(tr("Show"), "quiet", tr("Show the key"))
        self.show_key.setCheckable(True)
        self.new_key = button(tr("New key"), "quiet", tr("New key"))
        set_tip(self.new_key, tr("Programs that use the old key will be rejected."))
        self.key.row.addWidget(self.show_key)
        self.key.row.addWidget(self.new_key)
        self.key_problem, self.pages_problem = label(role="shortage"), label(role="shortage")
        self.pages = QLineEdit()
        self.pages.setAccessibleName(tr("Allowed web pages"))
        self.pages.setPlaceholderText("http://localhost:3000, https://example.org")
        self._build()

    def _build(self) -> None:
        for problem in (self.key_problem, self.pages_problem):
            problem.setWordWrap(True)
            problem.hide()
        self.needs_key.below.addWidget(self.key)
        self.needs_key.below.addWidget(self.key_problem)
        self.for_pages.below.addWidget(self.pages)
        self.for_pages.below.addWidget(self.pages_problem)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(10)
        for row in (self.needs_key, self.network, self.for_pages):
            layout.addWidget(row)
        self.needs_key.toggled.connect(lambda on: self.chosen.emit("server_needs_key", on))
        self.network.toggled.connect(lambda on: self.chosen.emit("server_on_network", on))
        self.for_pages.toggled.connect(lambda on: self.chosen.emit("server_for_pages", on))
        self.show_key.toggled.connect(self._reveal)
        self.new_key.clicked.connect(self.key_renewed)
        self.pages.editingFinished.connect(self._choose_pages)

    def show_settings(self, settings: Settings, key: str, key_problem: str) -> None:
        """Show the settings and the key, which is "" while it is unknown."""
        is_locked = settings.server_on_network
        self.needs_key.set_on(is_locked or settings.server_needs_key, is_locked=is_locked)
        self.needs_key.set_help(
            tr("Always required while the server is reachable from the network.")
            if is_locked
            else tr("Prevents other users' programs on this machine from using the model.")
        )
        self.network.set_on(settings.server_on_network)
        self.for_pages.set_on(settings.server_for_pages)
        self.key.setVisible(self.needs_key.is_on)
        self.key.set_text(key)
        self.key_problem.setText(key_problem)
        self.key_problem.setVisible(bool(key_problem) and self.needs_key.is_on)
        self.pages.setVisible(settings.server_for_pages)
        if not (self.pages.hasFocus() or self.pages_problem.text()):
            self.pages.setText(pages_text(settings.server_pages))
        self._show_pages_problem(self.pages_problem.text())

    @Slot(bool)
    def _reveal(self, on: bool) -> None:
        mode = QLineEdit.EchoMode
        self.key.edit.setEchoMode(mode.Normal if on else mode.Password)
        self.show_key.setText(tr("Hide") if on else tr("Show"))
        self.show_key.setAccessibleName(tr("Hide the key") if on else tr("Show the key"))

    @Slot()
    def _choose_pages(self) -> None:
        try:
            pages = read_pages(self.pages.text())
        except EngineError as error:
            self._show_pages_problem(error_text(error))
            return
        self._show_pages_problem("")
        self.chosen.emit("server_pages", pages)

    def _show_pages_problem(self, text: str) -> None:
        self.pages_problem.setText(text)
        self.pages_problem.setVisible(bool(text) and self.for_pages.is_on)


MAX_PORT = 65535
MAX_CLIENTS = 6  # maximum number of clients with their own line


class ServerPanel(QWidget):
    """The server page.

    Attributes:
        main: the server's switch, with its state below.
        problem: why the server is not running.
    """

    shown = Signal()
    hidden = Signal()
    switched = Signal(bool)
    chosen = Signal(str, object)  # name and value of a setting

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.main = SwitchRow(tr("Server"), "")
        self.problem = label(role="shortage")
        self.address = CopiedText(tr("Address"), tr("Copy the address"))
        self.port = QSpinBox(minimum=1, maximum=MAX_PORT)
        self.at_start = QCheckBox(caption_text(tr("Start with the window")))
        self.access = AccessSettings()
        self.example = ExampleText(tr("Copy the example"))
        self.table = RequestTable()
        self.no_requests = label(tr("None yet."), role="muted")
        self.clients = label(role="muted")
        self._build()
        self.show_view(LogView())

    def show_settings(self, settings: Settings, key: str, key_problem: str) -> None:
        """Show the settings and the key, which is "" while it is unknown."""
        show_number(self.port, settings.server_port)
        self.at_start.setChecked(settings.server_at_start)
        self.access.show_settings(settings, key, key_problem)

    def show_state(self, *, is_on: bool, state: str, problem: str) -> None:
        """Show the server's state and, if it failed, why."""
        self.main.set_on(is_on)
        self.main.set_help(state)
        self.problem.setText(problem)
        self.problem.setVisible(bool(problem))

    def show_address(self, url: str, *, needs_key: bool) -> None:
        """Show the base URL (with "/v1") and an example."""
        self.address.set_text(url)
        self.example.set_text(example_text(url, needs_key=needs_key))

    def show_view(self, view: LogView) -> None:
        """Show requests and clients."""
        self.table.show_requests(view.requests)
        self.table.setVisible(bool(view.requests))
        self.no_requests.setVisible(not view.requests)
        self.clients.setText(clients_text(view.clients))
        self.clients.setVisible(bool(view.clients))

    def _build(self) -> None:
        self.port.setAccessibleName(tr("Port"))
        self.port.setKeyboardTracking(False)  # otherwise each digit would restart the server
        ignore_wheel(self.port)
        self.problem.setWordWrap(True)
        self.clients.setWordWrap(True)
        self.main.below.addWidget(self.problem)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(16, 4, 16, 12)
        column.setSpacing(10)
        column.addWidget(self.main)
        column.addWidget(label(tr("Base URL for programs"), role="muted"))
        column.addWidget(self.address)
        column.addLayout(self._port_row())
        column.addWidget(self.at_start)  # next to the port, it would be too wide for a narrow panel
        column.addWidget(line())
        column.addWidget(label(tr("Requests"), role="heading"))
        column.addWidget(self.clients)
        column.addWidget(self.no_requests)
        column.addWidget(self.table, 1)
        column.addWidget(line())
        column.addWidget(self.access)
        column.addWidget(line())
        column.addWidget(label(tr("Example"), role="muted"))
        column.addWidget(self.example)
        column.addStretch()
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(page_scroll(content, column, tr("Server")))
        self.main.toggled.connect(self.switched)
        self.port.valueChanged.connect(lambda port: self.chosen.emit("server_port", port))
        self.at_start.clicked.connect(lambda on: self.chosen.emit("server_at_start", on))
        self.access.chosen.connect(self.chosen)

    def _port_row(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.addWidget(label(tr("Port")))
        row.addWidget(self.port)
        row.addStretch()
        return row

    @Slot()
    def press(self) -> None:
        """Toggle the server."""
        self.main.press()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.shown.emit()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.hidden.emit()


def state_text(view: LogView) -> str:
    """Describe a running server's state: "Answering 3 requests, 41.0 tok/s"."""
    if not view.n_running:
        return tr("Waiting for requests")
    text = tr_n("Answering {n} request", "Answering {n} requests", view.n_running)
    speed = rate_text(view.tokens_per_s)
    return tr("{text}, {rate} tok/s").format(text=text, rate=speed) if speed else text


def clients_text(clients: Sequence[ClientSpeed]) -> str:
    """Return one line per client, with its speed and token count."""
    lines = [_client_line(client) for client in clients[:MAX_CLIENTS]]
    if n := len(clients[MAX_CLIENTS:]):
        lines.append(tr_n("{n} more client", "{n} more clients", n))
    return "\n".join(lines)


def _client_line(client: ClientSpeed) -> str:
    tokens = tr_n("{n} token so far", "{n} tokens so far", client.n_tokens)
    parts = [tokens] if client.n_tokens else []
    if speed := rate_text(client.tokens_per_s):
        parts.insert(0, tr("{rate} tok/s now").format(rate=speed))
    return f"{one_line(client.client)}: {', '.join(parts)}"


def example_text(url: str, *, needs_key: bool) -> str:
    """Return a terminal command that sends a request."""
    key = ' -H "Authorization: Bearer YOUR_KEY"' * needs_key
    body = r'"{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}"'
    header = '-H "Content-Type: application/json"'
    return f"curl {url}/chat/completions {header}{key} -d {body}"


class ServerChip(Chip):
    """Chip that opens the server page; it is shown while the server is running."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        set_tip(self, tr("Other programs can use the model. Click to see the server."))

    def show_running(self, is_running: bool) -> None:
        self.set_texts((tr("Server on"), tr("Server")) if is_running else ())
