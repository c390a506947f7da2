"""The dialog for tool servers, its cards and presenter, and the settings panel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QMessageBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import error_text, tr, tr_n
from app.tools.page.server_form import ADDRESS, JSON, ServerForm
from app.tools.page.tool_session import ToolSession
from app.tools.server_store import (
    ServerTool,
    ToolServer,
    ToolServerState,
    checked_server,
    join_command,
    servers_in,
    split_command,
)
from app.widgets.buttons import IconButton, button
from app.widgets.controls import Switch, page_scroll
from app.widgets.text import ElidedLabel, caption_text, label, plain_tip, set_tip
from app.widgets.theme import icon, set_role, theme, theme_signals
from engine import EngineError

ROLES = {"off": "muted", "starting": "muted", "ready": "ok", "failed": "shortage"}


class ServerCard(QWidget):
    """Card for one server.

    Attributes:
        switch: enables the server.
        tools: checkboxes by tool name.
        head: button that expands the list of tools.
    """

    switched = Signal(bool)
    tool_switched = Signal(str, bool)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "card")
        self.tools: dict[str, QCheckBox] = {}
        self._shown: tuple[ServerTool, ...] = ()
        self.switch = Switch()
        self.switch.setAccessibleName(tr("Use {name}").format(name=name))
        self.switch.clicked.connect(self.switched)
        self._name = ElidedLabel(name)
        self._name.setProperty("role", "heading")
        self._where = ElidedLabel()
        self._where.setProperty("role", "muted")
        self.status = label(role="muted")
        self.status.setWordWrap(True)
        self.status.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.restart = IconButton("regenerate", tr("Restart {name}").format(name=name), size=14)
        self.edit = IconButton("edit", tr("Edit {name}").format(name=name), size=14)
        self.remove = IconButton("delete", tr("Remove {name}").format(name=name), size=14)
        self._make_head()
        self._build()

    def show_state(self, state: ToolServerState) -> None:
        """Show the server's state."""
        server = state.server
        self.switch.setChecked(server.is_on)
        self._where.set_full_text(join_command(server.command) or server.url)
        set_role(self.status, ROLES[state.status])
        self.status.setText(_status_text(state))
        self.switch.setAccessibleDescription(self.status.text())
        self.restart.setEnabled(server.is_on)
        if state.tools != self._shown:
            self._make_tools(state.tools)
        for name, box in self.tools.items():
            box.setChecked(name not in server.hidden)
        self._show_head()

    def _make_tools(self, tools: tuple[ServerTool, ...]) -> None:
        self._shown = tools
        while self._list.count():
            item = self._list.takeAt(0)
            if item is not None and (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        self.tools = {tool.name: self._box(tool) for tool in tools}

    def _box(self, tool: ServerTool) -> QCheckBox:
        box = QCheckBox(caption_text(tool.title or tool.name))
        box.clicked.connect(lambda on: self._switch_tool(tool.name, on))
        about = tool.tool.description.strip()
        set_tip(box, about)
        box.setAccessibleDescription(about)
        self._list.addWidget(box)
        if about:
            line = ElidedLabel(about.splitlines()[0])
            line.setProperty("role", "muted")
            line.setContentsMargins(24, 0, 0, 4)
            self._list.addWidget(line)
        return box

    def _switch_tool(self, name: str, on: bool) -> None:
        self._show_head()
        self.tool_switched.emit(name, on)

    def _make_head(self) -> None:
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        self._body = QWidget()
        self._body.hide()
        self._list = QVBoxLayout(self._body)
        self._list.setContentsMargins(4, 2, 0, 2)
        self._list.setSpacing(2)
        self.head.toggled.connect(self._body.setVisible)
        self.head.toggled.connect(self._show_head)
        theme_signals().changed.connect(self._show_head)

    @Slot()
    def _show_head(self) -> None:
        n, n_all = sum(box.isChecked() for box in self.tools.values()), len(self.tools)
        text = tr_n("{n} tool", "{n} tools", n_all)
        if n < n_all:
            text = tr("{n} of {total} tools").format(n=n, total=n_all)
        self.head.setText(caption_text(text))
        self.head.setAccessibleName(
            tr("{tools} of {name}").format(tools=text, name=self._name.text())
        )
        self.head.setIcon(
            icon("chevron-up" if self.head.isChecked() else "chevron-down", theme().muted)
        )
        self.head.setVisible(bool(n_all))
        self._body.setVisible(bool(n_all) and self.head.isChecked())

    def _build(self) -> None:
        top = QHBoxLayout()
        top.setSpacing(10)
        top.addWidget(self.switch)
        top.addWidget(self._name, 1)
        for part in (self.restart, self.edit, self.remove):
            top.addWidget(part)
        grid = QGridLayout()
        grid.setVerticalSpacing(2)
        grid.addWidget(self._where, 0, 0)
        grid.addWidget(self.status, 1, 0)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 8, 8)
        column.setSpacing(4)
        column.addLayout(top)
        column.addLayout(grid)
        column.addWidget(self.head, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(self._body)


def _status_text(state: ToolServerState) -> str:
    if state.status == "failed":
        return state.problem
    if state.status == "ready" and not state.tools:
        return tr("Ready, but it has no tools")
    texts = {"off": tr("Off"), "starting": tr("Starting …"), "ready": tr("Ready")}
    return texts[state.status]


class ToolDialog(QDialog):
    """List of servers, with buttons to add, edit and remove them.

    Attributes:
        cards: cards by server name.
    """

    add_requested = Signal()
    edit_requested = Signal(str)  # name of a server, also in the signals below
    remove_requested = Signal(str)
    restart_requested = Signal(str)
    switched = Signal(str, bool)
    tool_switched = Signal(str, str, bool)  # server, tool, whether models see it

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Tools"))
        self.cards: dict[str, ServerCard] = {}
        self.add = button(tr("Add a server…"), "primary")
        self.add.clicked.connect(self.add_requested)
        self.close_ = button(tr("Close"))
        self.close_.clicked.connect(self.accept)
        self.nothing = label(tr("No servers yet."), "muted")
        self.nothing.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._build()

    def show_states(self, states: Sequence[ToolServerState]) -> None:
        """Show all servers' states."""
        names = [state.server.name for state in states]
        if names != list(self.cards):
            self._make_cards(names)
        for state in states:
            self.cards[state.server.name].show_state(state)
        self.nothing.setVisible(not states)

    def _make_cards(self, names: Sequence[str]) -> None:
        for name in set(self.cards) - set(names):
            card = self.cards.pop(name)
            self._column.removeWidget(card)
            card.hide()
            card.deleteLater()
        self.cards = {name: self.cards.get(name) or self._card(name) for name in names}
        for place, card in enumerate(self.cards.values()):
            self._column.insertWidget(place + 1, card)

    def _card(self, name: str) -> ServerCard:
        card = ServerCard(name)
        card.switched.connect(lambda on: self.switched.emit(name, on))
        card.tool_switched.connect(lambda tool, on: self.tool_switched.emit(name, tool, on))
        card.edit.clicked.connect(lambda: self.edit_requested.emit(name))
        card.remove.clicked.connect(lambda: self.remove_requested.emit(name))
        card.restart.clicked.connect(lambda: self.restart_requested.emit(name))
        return card

    def _build(self) -> None:
        about = label(
            tr(
                "Models can use tools from Model Context Protocol (MCP) servers. The chat shows"
                " each call and runs it only after you allow it."
            ),
            "muted",
        )
        warning = label(
            tr(
                "A tool server is a program that runs with your permissions: it can read, change"
                " and send anything you can. Only add servers that you trust."
            )
        )
        set_role(warning, "warn")
        for text in (about, warning):
            text.setWordWrap(True)
        content = QWidget()
        self._column = QVBoxLayout(content)
        self._column.setContentsMargins(0, 0, 8, 0)
        self._column.setSpacing(8)
        self._column.addWidget(self.nothing)
        self._column.addStretch(1)
        row = QHBoxLayout()
        row.addWidget(self.add)
        row.addStretch(1)
        row.addWidget(self.close_)
        layout = QVBoxLayout(self)
        layout.setSpacing(12)
        layout.addWidget(about)
        layout.addWidget(warning)
        layout.addWidget(page_scroll(content, self._column, tr("Tool servers")), 1)
        layout.addLayout(row)
        self.resize(620, 540)


class ToolPanel(QWidget):
    """Settings panel with a summary of the tool servers and a button that opens their dialog."""

    def __init__(self, states: Callable[[], Sequence[ToolServerState]]) -> None:
        super().__init__()
        self._states = states
        self.text = label(role="muted")
        self.text.setWordWrap(True)
        self.change = button(tr("Tool servers…"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 6, 0, 6)
        row.addWidget(self.text, 1)
        row.addWidget(self.change)
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Update the summary."""
        self.text.setText(summary(self._states()))


def summary(states: Sequence[ToolServerState]) -> str:
    """Summarize servers: "2 servers on, 8 tools, 1 failed"."""
    if not states:
        return tr("Programs that models can call through the Model Context Protocol. None yet.")
    n_on = sum(state.server.is_on for state in states)
    n_tools = sum(tool.name not in state.server.hidden for state in states for tool in state.tools)
    parts = [
        tr_n("{n} server on", "{n} servers on", n_on), tr_n("{n} tool", "{n} tools", n_tools)
    ]  # fmt: skip
    n_failed = sum(state.status == "failed" for state in states)
    if n_failed:
        parts.append(tr_n("{n} failed", "{n} failed", n_failed))
    return ", ".join(parts)


class ToolPresenter(QObject):
    """Presenter for the dialogs while they are open.

    Args:
        over: parent for the dialogs.
    """

    def __init__(self, session: ToolSession, over: QWidget, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._over = session, over
        self.dialog: ToolDialog | None = None
        self.form: ServerForm | None = None
        self._edited: ToolServer | None = None
        session.changed.connect(self._refresh)

    @Slot()
    def open(self) -> None:
        self._session.begin()
        if self.dialog is not None:
            self.dialog.raise_()
            return
        session = self._session
        dialog = self.dialog = ToolDialog(self._over)
        dialog.switched.connect(session.switch)
        dialog.tool_switched.connect(session.show_tool)
        dialog.restart_requested.connect(session.restart)
        dialog.add_requested.connect(lambda: self._ask(None))
        dialog.edit_requested.connect(lambda name: self._ask(self._server(name)))
        dialog.remove_requested.connect(self._remove)
        dialog.finished.connect(self._on_closed)
        self._refresh()
        dialog.open()

    def _server(self, name: str) -> ToolServer:
        return next(server for server in self._session.servers if server.name == name)

    @Slot()
    def _refresh(self) -> None:
        if self.dialog is not None:
            self.dialog.show_states(self._session.states)

    def _ask(self, server: ToolServer | None) -> None:
        self._edited = server
        form = self.form = ServerForm(server, self.dialog)
        form.submitted.connect(self._submit)
        form.finished.connect(self._on_form_closed)
        form.open()

    @Slot()
    def _submit(self) -> None:
        form, edited = self.form, self._edited
        assert form is not None, "it sent the signal"
        try:
            if form.tabs.currentIndex() == JSON:
                self._session.add(servers_in(form.json.toPlainText()))
            else:
                server = self._typed(form, edited)
                self._session.put(server, edited.name if edited else "")
        except EngineError as error:
            form.show_problem(error_text(error))
            return
        form.accept()

    def _typed(self, form: ServerForm, edited: ToolServer | None) -> ToolServer:
        name = form.name.text().strip()
        taken = {server.name for server in self._session.servers}
        if edited is not None:
            taken.discard(edited.name)
        if name in taken:
            raise EngineError(tr("Another server is already named {name}.").format(name=name))
        server = replace(edited, name=name) if edited is not None else ToolServer(name)
        if form.tabs.currentIndex() == ADDRESS:
            headers = _pairs(form.headers.toPlainText(), ":")
            url = form.url.text().strip()
            found = replace(server, command=(), environment={}, folder="", url=url, headers=headers)
        else:
            found = replace(
                server,
                command=split_command(form.command.text()),
                environment=_pairs(form.variables.toPlainText(), "="),
                folder=form.folder.text().strip(),
                url="",
                headers={},
            )
        return checked_server(found)

    @Slot(str)
    def _remove(self, name: str) -> None:
        text = tr("Remove {name} and its settings?").format(name=name)
        question = QMessageBox.question(self.dialog, tr("Remove the tool server"), plain_tip(text))
        if question is QMessageBox.StandardButton.Yes:
            self._session.remove(name)

    @Slot()
    def _on_form_closed(self) -> None:
        form, self.form = self.form, None
        if form is not None:
            form.headers.clear()  # may contain secrets
            form.deleteLater()

    @Slot()
    def _on_closed(self) -> None:
        dialog, self.dialog = self.dialog, None
        if dialog is not None:
            dialog.deleteLater()


def _pairs(text: str, separator: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, mark, value = line.partition(separator)
        if not mark or not name.strip():
            sentence = tr("“{line}” does not have the form {form}.")
            form = f"NAME{separator}VALUE"
            raise EngineError(sentence.format(line=line[:40], form=form))
        pairs[name.strip()] = value.strip()
    return pairs
