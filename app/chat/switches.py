"""Composer buttons for thinking, reasoning effort, and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Slot
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QMenu, QPushButton, QSizePolicy

from app.chat.conversation import EFFORTS
from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient
from app.core.translation import tr, tr_later, tr_n
from app.widgets.buttons import button
from app.widgets.text import caption_text, set_tip

if TYPE_CHECKING:
    from app.tools.page.tool_session import ToolSession
    from app.tools.server_store import ToolServerState

BY_TEMPLATE = tr_later("Model default")
LEVELS = dict(
    zip(
        ("", *EFFORTS),
        (BY_TEMPLATE, tr_later("Low"), tr_later("Medium"), tr_later("High")),
        strict=True,
    )
)
"""Display names by value of `reasoning_effort`."""


class ThinkingSwitch(QObject):
    """The buttons for thinking and reasoning effort, shown if the chat template supports them."""

    def __init__(
        self, composer: Composer, session: ChatSession, client: EngineClient, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self.button = button(tr("Think"), "chip", tr("Think before answering"))
        self.button.setCheckable(True)
        self.button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.button.clicked.connect(session.set_thinking)
        set_tip(self.button, tr("Whether the model thinks before answering in this chat"))
        self.effort, self._levels = self._make_effort()
        for tool in (self.button, self.effort):
            composer.add_tool(tool)
        session.opened.connect(self.refresh)
        for changed in (client.loaded, client.unloaded, client.state_changed):
            changed.connect(self.refresh)
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Show the open chat's options; templates think by default."""
        model = self._client.model
        self.button.setVisible(model is not None and model.info.can_think)
        self.button.setChecked(self._session.current.thinks is not False)
        self.effort.setVisible(model is not None and model.info.has_effort)
        chosen = self._session.current.effort
        for action in self._levels.actions():
            action.setChecked(action.data() == chosen)
        level = tr(LEVELS[chosen])
        text = tr("Effort: {level}").format(level=level.lower()) if chosen else tr("Effort")
        self.effort.setText(f"{caption_text(text)} ▾")
        self.effort.setAccessibleName(tr("Reasoning effort: {level}").format(level=level))

    def _make_effort(self) -> tuple[QPushButton, QActionGroup]:
        made = button("", "chip")
        made.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        set_tip(made, tr("How much the model thinks before answering in this chat"))
        menu = QMenu(made)
        levels = QActionGroup(menu)
        for word, name in LEVELS.items():
            action = levels.addAction(caption_text(tr(name)))
            action.setCheckable(True)
            action.setData(word)
            menu.addAction(action)
        levels.triggered.connect(self._choose)
        made.setMenu(menu)
        return made, levels

    @Slot(QAction)
    def _choose(self, action: QAction) -> None:
        self._session.set_effort(action.data())
        self.refresh()


class ToolSwitch(QObject):
    """The button with the number of tools and a menu of servers, shown if a server is enabled."""

    def __init__(
        self, composer: Composer, session: ChatSession, source: ToolSession, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._source = session, source
        self.button = button("", "chip")
        self.button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        set_tip(self.button, tr("Which tools the model may call in this chat"))
        self.menu = QMenu(self.button)
        self.menu.aboutToShow.connect(self._fill)
        self.button.setMenu(self.menu)
        composer.add_tool(self.button)
        session.opened.connect(self.refresh)
        session.tools_changed.connect(self.refresh)
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Show the number of tools in the open chat."""
        self.button.setVisible(bool(self._servers()))
        n = len(self._session.calls.offered(self._session.current))
        is_used = self._session.current.uses_tools
        text = tr("Tools: {n}").format(n=n) if is_used else tr("Tools: off")
        self.button.setText(f"{caption_text(text)} ▾")
        self.button.setAccessibleName(text)

    def _servers(self) -> list[ToolServerState]:
        return [state for state in self._source.states if state.server.is_on]

    @Slot()
    def _fill(self) -> None:
        chat = self._session.current
        self.menu.clear()
        whole = self.menu.addAction(caption_text(tr("Tools in this chat")))
        whole.setCheckable(True)
        whole.setChecked(chat.uses_tools)
        whole.triggered.connect(self._set_used)
        self.menu.addSeparator()
        for state in self._servers():
            name = state.server.name
            text = f"{name} · {_state_text(state)}"
            action = self.menu.addAction(caption_text(text))
            action.setCheckable(True)
            action.setChecked(name not in chat.servers_off)
            action.setEnabled(chat.uses_tools)
            action.triggered.connect(lambda is_on, name=name: self._set_server(name, is_on))

    @Slot(bool)
    def _set_used(self, used: bool) -> None:
        self._session.set_tools(used=used, servers_off=self._session.current.servers_off)

    def _set_server(self, name: str, is_on: bool) -> None:
        others = [off for off in self._session.current.servers_off if off != name]
        off = tuple(others if is_on else [*others, name])
        self._session.set_tools(used=True, servers_off=off)


def _state_text(state: ToolServerState) -> str:
    if state.status == "ready":
        hidden = state.server.hidden
        n = sum(tool.name not in hidden for tool in state.tools)
        return tr_n("{n} tool", "{n} tools", n)
    return tr("starting") if state.status == "starting" else tr("not available")
