"""The dialog of the servers of tools: what each is doing, and which of its tools models get."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.core.translation import tr
from app.tools.page.views.server_card import ServerCard
from app.tools.states import ToolServerState
from app.widgets.buttons import button
from app.widgets.controls import page_scroll
from app.widgets.text import label
from app.widgets.theme import set_role


class ToolDialog(QDialog):
    """Lists servers, with buttons to add, edit and remove them.

    Attributes:
        cards: card of each server, by its name.
    """

    add_requested = Signal()
    edit_requested = Signal(str)  # name of a server, as in all that follow
    remove_requested = Signal(str)
    restart_requested = Signal(str)
    switched = Signal(str, bool)
    tool_switched = Signal(str, str, bool)  # server, tool, whether models are told of it

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Tools"))
        self.cards: dict[str, ServerCard] = {}
        self.add = button(tr("Add a server…"), "primary")
        self.add.clicked.connect(self.add_requested)
        self.close_ = button(tr("Close"))
        self.close_.clicked.connect(self.accept)
        self.nothing = label(tr("No servers yet. Chats go on without tools."), "muted")
        self.nothing.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._build()

    def show_states(self, states: Sequence[ToolServerState]) -> None:
        """Show the servers as they are."""
        names = [state.server.name for state in states]
        if names != list(self.cards):
            self._make_cards(names)
        for state in states:
            self.cards[state.server.name].show_state(state)
        self.nothing.setVisible(not states)

    def _make_cards(self, names: Sequence[str]) -> None:
        """Have a card for each server, in their order."""
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
                "Models can use tools that servers offer by the Model Context Protocol (MCP). The"
                " chat shows each call, and it runs only after you allow it."
            ),
            "muted",
        )
        warning = label(
            tr(
                "A tool server is a program that runs with your rights: it can read, change and"
                " send whatever you can. Add only servers that you trust."
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
