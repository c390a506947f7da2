"""The server page: the switch, the address, the requests, who may use it, and an example."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QCheckBox, QHBoxLayout, QSpinBox, QVBoxLayout, QWidget

from app.core.settings import Settings
from app.core.translation import tr, tr_n
from app.server.page.ledger_view import ClientSpeed, LedgerView
from app.server.page.views.access import AccessSettings
from app.server.page.views.parts import CopiedText, ExampleText, SwitchRow
from app.server.page.views.request_table import RequestTable, rate_text
from app.widgets.controls import ignore_wheel, line, page_scroll, show_number
from app.widgets.text import caption_text, label
from engine import one_line

MOST_PORT = 65535
MOST_CLIENTS = 6
"""Number of clients that are named; the others are counted."""


class ServerPanel(QWidget):
    """Page of the server.

    Attributes:
        main: the switch of the server; the sentence below says what it is doing.
        problem: says why the server does not run.
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
        self.port = QSpinBox(minimum=1, maximum=MOST_PORT)
        self.at_start = QCheckBox(caption_text(tr("Start with the window")))
        self.access = AccessSettings()
        self.example = ExampleText(tr("Copy the example"))
        self.table = RequestTable()
        self.no_requests = label(tr("None yet."), role="muted")
        self.clients = label(role="muted")
        self._build()
        self.show_view(LedgerView())

    def show_settings(self, settings: Settings, key: str, key_problem: str) -> None:
        """Show what is chosen, and the key; "" while it is unknown."""
        show_number(self.port, settings.server_port)
        self.at_start.setChecked(settings.server_at_start)
        self.access.show_settings(settings, key, key_problem)

    def show_state(self, *, is_on: bool, state: str, problem: str) -> None:
        """Show whether the server is switched on, what it is doing, and why it is not running."""
        self.main.set_on(is_on)
        self.main.set_help(state)
        self.problem.setText(problem)
        self.problem.setVisible(bool(problem))

    def show_address(self, url: str, *, needs_key: bool) -> None:
        """Show the address for programs, and how to use it.

        Args:
            url: the address with "/v1".
        """
        self.address.set_text(url)
        self.example.set_text(example_text(url, needs_key=needs_key))

    def show_view(self, view: LedgerView) -> None:
        """Show the requests and the clients."""
        self.table.show_requests(view.requests)
        self.table.setVisible(bool(view.requests))
        self.no_requests.setVisible(not view.requests)
        self.clients.setText(clients_text(view.clients))
        self.clients.setVisible(bool(view.clients))

    def _build(self) -> None:
        self.port.setAccessibleName(tr("Port"))
        self.port.setKeyboardTracking(False)  # else each digit would start the server again
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
        column.addWidget(self.at_start)  # beside the port it is too wide for a narrow panel
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
        """Press the switch of the server."""
        self.main.press()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.shown.emit()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.hidden.emit()


def state_text(view: LedgerView) -> str:
    """Return what a running server is doing: "Answering 3 requests, 41.0 tok/s"."""
    if not view.n_running:
        return tr("Waiting for requests")
    text = tr_n("Answering {n} request", "Answering {n} requests", view.n_running)
    speed = rate_text(view.tokens_per_s)
    return tr("{text}, {rate} tok/s").format(text=text, rate=speed) if speed else text


def clients_text(clients: Sequence[ClientSpeed]) -> str:
    """Return a line for each client: its speed now and its tokens."""
    lines = [_client_line(client) for client in clients[:MOST_CLIENTS]]
    if n := len(clients[MOST_CLIENTS:]):
        lines.append(tr_n("{n} more client", "{n} more clients", n))
    return "\n".join(lines)


def _client_line(client: ClientSpeed) -> str:
    tokens = tr_n("{n} token so far", "{n} tokens so far", client.n_tokens)
    parts = [tokens] if client.n_tokens else []
    if speed := rate_text(client.tokens_per_s):
        parts.insert(0, tr("{rate} tok/s now").format(rate=speed))
    return f"{one_line(client.client)}: {', '.join(parts)}"


def example_text(url: str, *, needs_key: bool) -> str:
    """Return a line for a terminal that asks the server something."""
    key = ' -H "Authorization: Bearer YOUR_KEY"' * needs_key
    body = r'"{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}"'
    header = '-H "Content-Type: application/json"'
    return f"curl {url}/chat/completions {header}{key} -d {body}"
