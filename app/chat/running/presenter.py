"""The presenter of the list of running answers."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Slot

from app.chat.presenter import ChatPresenter
from app.chat.running.running_chip import RunningChip, RunningRow, stage_text
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient

REFRESH_MS = 250


class RunningPresenter(QObject):
    """Connection of the running answers with their chip and its list.

    The chip is there unless the only answer is written in the open chat, where it is seen anyway.

    Args:
        chats: opens chats.
    """

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        chats: ChatPresenter,
        chip: RunningChip,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._chip = session, chip
        self._tokens_per_s = 0.0
        self._timer = QTimer(self, interval=REFRESH_MS)  # while somebody looks at the list
        self._timer.timeout.connect(self.show)
        chip.clicked.connect(self._follow)
        chip.chosen.connect(chats.open_chat)
        chip.stop_requested.connect(session.stop_answer)
        session.answers_changed.connect(self.show)
        session.opened.connect(self.show)
        session.chats_changed.connect(self.show)
        client.rate.connect(self._on_rate)

    @Slot(float, int)
    def _on_rate(self, tokens_per_s: float, n_answers: int) -> None:
        self._tokens_per_s = tokens_per_s if n_answers > 1 else 0.0

    @Slot()
    def _follow(self) -> None:
        """Show the answers as they are now, and again while the list is open."""
        self._timer.start()
        self.show()

    @Slot()
    def show(self) -> None:
        """Show which answers run, and how far they are."""
        answers = self._session.answers
        rows = [
            RunningRow(one.chat.id, one.chat.shown_title, stage_text(one.running))
            for one in answers
        ]
        is_elsewhere = any(one.chat is not self._session.current for one in answers)
        self._chip.show_rows(rows, self._tokens_per_s, wanted=is_elsewhere)
        if not self._chip.list.isVisible():
            self._timer.stop()
