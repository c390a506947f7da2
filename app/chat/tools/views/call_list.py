"""The cards of an answer's calls, below each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QApplication, QVBoxLayout, QWidget

from app.chat.tools.tool_use import CallStep, ToolUse
from app.chat.tools.views.call_card import CallCard


class CallList(QWidget):
    """Cards of calls in the order in which the model has asked for them."""

    chosen = Signal(object, str)  # CallStep, id of a call

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.cards: list[CallCard] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)

    def show_calls(self, calls: Sequence[ToolUse], *, is_growing: bool) -> None:
        """Show calls as they are now; a card with the focus passes it on to the next that waits.

        Args:
            is_growing: whether their answer is still being written.
        """
        focused = QApplication.focusWidget()
        had_focus = focused is not None and self.isAncestorOf(focused)
        kept = {card.call.id: card for card in self.cards}
        ids = {call.id for call in calls}
        for number, card in kept.items():
            if number not in ids:
                self._column.removeWidget(card)
                card.hide()
                card.deleteLater()
        self.cards = [kept.get(call.id) or self._make(call) for call in calls]
        for card, call in zip(self.cards, calls, strict=True):
            card.show_call(call, is_growing=is_growing)
        waiting = next((card for card in self.cards if card.is_waiting), None)
        if had_focus and waiting is not None and focused is not None and not focused.isVisible():
            waiting.take_focus()

    def _make(self, call: ToolUse) -> CallCard:
        card = CallCard(call, self)
        card.chosen.connect(partial(self._tell, card))
        self._column.addWidget(card)
        card.show()
        return card

    def _tell(self, card: CallCard, step: CallStep) -> None:
        self.chosen.emit(step, card.call.id)
