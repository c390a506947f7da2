"""The tools' part of the settings page: how many there are, and the way to their dialog."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.core.translation import tr, tr_n
from app.tools.states import ToolServerState
from app.widgets.buttons import button
from app.widgets.text import label


class ToolPanel(QWidget):
    """Panel that says what servers of tools there are.

    Attributes:
        text: sentence on the servers.
        change: button that opens their dialog.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = label(role="muted")
        self.text.setWordWrap(True)
        self.change = button(tr("Tool servers…"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 6, 0, 6)
        row.addWidget(self.text, 1)
        row.addWidget(self.change)

    def show_states(self, states: Sequence[ToolServerState]) -> None:
        """Show how many servers and tools there are, and how many have failed."""
        self.text.setText(summary(states))


def summary(states: Sequence[ToolServerState]) -> str:
    """Return what there is of servers: "2 servers on, 8 tools, 1 failed"."""
    if not states:
        return tr("Programs that models may call, by the Model Context Protocol (MCP). None yet.")
    n_on = sum(state.server.is_on for state in states)
    n_tools = sum(tool.name not in state.server.hidden for state in states for tool in state.tools)
    parts = [
        tr_n("{n} server on", "{n} servers on", n_on), tr_n("{n} tool", "{n} tools", n_tools)
    ]  # fmt: skip
    n_failed = sum(state.status == "failed" for state in states)
    if n_failed:
        parts.append(tr_n("{n} failed", "{n} failed", n_failed))
    return ", ".join(parts)
