"""The button by which a person says which tools models may call in a chat."""

from __future__ import annotations

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QMenu, QSizePolicy

from app.chat.session import ChatSession
from app.chat.tools.source import ToolSource
from app.chat.views.composer import Composer
from app.core.translation import tr, tr_n
from app.tools.server_store import ToolServerState
from app.widgets.buttons import button
from app.widgets.text import caption_text, set_tip


class ToolSwitch(QObject):
    """Button of the composer with a menu of servers, there while one of them is on.

    Attributes:
        button: says how many tools models may call in the open chat.
    """

    def __init__(
        self, composer: Composer, session: ChatSession, source: ToolSource, parent: QObject
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
        """Show how many tools there are for the open chat."""
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
        """Offer all servers as they are now."""
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
    return tr("is being started") if state.status == "starting" else tr("not available")
