"""The turns of the open chat, in a scrolling column that follows an answer as it grows.

Long chats open with their last turns; earlier ones are created on request, so that
opening costs the same for every chat. Of the last turns those that fill the view are there at once,
and the others come one by one, as a turn with code and tables takes some 20 ms.
"""

from __future__ import annotations

import time

from PySide6.QtCore import QCoreApplication, QEvent, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.message_view import AnswerView, MessageView, UserView
from app.widgets.buttons import button
from app.widgets.controls import keep_margin

N_SHOWN = 30
MOST_SHOWN = 40
"""Turns that stay while others are added: each one that an answer grows below costs time."""

N_AT_ONCE, AT_ONCE_S = 4, 0.015
"""Turns that an opened chat has at once: so many, and those that can be made in this time."""

N_LAYOUTS = 4
"""Rounds until a turn has its place: its texts know their heights once they have their widths."""

COLUMN_WIDTH = 760
MARGIN = 34
STICKY_PIXELS = 48


class ChatView(QScrollArea):
    """View of one conversation; indices count all its turns, shown or not."""

    resend_requested = Signal(int, str)
    regenerate_requested = Signal()
    continue_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName("Conversation")
        self._chat = Conversation()
        self._first = 0  # index of the first turn that is shown
        self._views: list[MessageView] = []
        self._is_following = True
        self._from_end = 0  # pixels from what is seen to the end
        self._earlier = button("Show earlier messages", "quiet")
        self._earlier.clicked.connect(self.show_earlier)
        self._wanted = 0  # index of the first turn that will be shown
        self._more = QTimer(self, interval=0)
        self._more.timeout.connect(self._make_more)
        self._column = QWidget()
        self._column.setMaximumWidth(COLUMN_WIDTH)
        self._layout = QVBoxLayout(self._column)
        self._layout.setContentsMargins(0, 20, 0, 24)
        self._layout.setSpacing(18)
        self._layout.addWidget(self._earlier, 0, Qt.AlignmentFlag.AlignHCenter)
        self._layout.addStretch(1)
        content = QWidget()
        outer = QHBoxLayout(content)
        outer.setContentsMargins(MARGIN, 0, MARGIN, 0)
        outer.addStretch(1)
        outer.addWidget(self._column, 1000)
        outer.addStretch(1)
        self.setWidget(content)
        keep_margin(self, outer)
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(self._follow)
        bar.valueChanged.connect(self._on_scrolled)

    @property
    def shown(self) -> list[MessageView]:
        return self._views

    def show_chat(self, chat: Conversation, *, is_answering: bool = False) -> None:
        """Show another chat, whose last turn is still growing if `is_answering`."""
        for view in self._views:
            self._remove(view)
        self._views = []
        self._chat = chat
        self._more.stop()
        self._first = len(chat.messages)
        self._wanted = max(0, self._first - N_SHOWN)
        end = time.perf_counter() + AT_ONCE_S
        while self._first > self._wanted:
            self._make_earlier(is_growing=is_answering and not self._views)
            if len(self._views) >= N_AT_ONCE and time.perf_counter() > end:
                break
        if self._first > self._wanted:
            self._more.start()
        self._mark_last()
        self._is_following, self._from_end = True, 0
        QTimer.singleShot(0, self, self.scroll_to_end)

    def add_message(self, index: int) -> None:
        """Show the turn added at the end; an answer is growing at first."""
        view = self._make(index)
        self._views.append(view)
        self._layout.insertWidget(self._layout.count() - 1, view)
        self._leave_out_oldest()
        self._mark_last()
        self._is_following = True

    def cut(self, n_messages: int) -> None:
        """Show only the first `n_messages` turns."""
        n_kept = max(0, n_messages - self._first)
        for view in self._views[n_kept:]:
            self._remove(view)
        del self._views[n_kept:]
        self._first = min(self._first, n_messages)
        self._wanted = min(self._wanted, self._first)
        self._mark_last()

    def grow(self) -> None:
        """Show the text added to the last answer."""
        if (view := self.last_answer()) is not None:
            view.grow()

    def set_status(self, text: str) -> None:
        """Show the engine's present step below the growing answer."""
        if (view := self.last_answer()) is not None:
            view.set_status(text)

    def close_answer(self, index: int) -> None:
        number = index - self._first
        if 0 <= number < len(self._views):
            view = self._views[number]
            if isinstance(view, AnswerView):
                view.close_answer()

    def last_answer(self) -> AnswerView | None:
        last = self._views[-1] if self._views else None
        return last if isinstance(last, AnswerView) else None

    @Slot()
    def refresh(self, *, is_answering: bool = False) -> None:
        """Rebuild the view, as after a change of the theme."""
        self.show_chat(self._chat, is_answering=is_answering)

    @Slot()
    def show_earlier(self) -> None:
        """Show more turns above, without moving the visible ones."""
        bar = self.verticalScrollBar()
        self._is_following, self._from_end = False, bar.maximum() - bar.value()
        self._wanted = max(0, self._first - N_SHOWN)
        self._more.start()

    @Slot()
    def scroll_to_end(self) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())

    @Slot()
    def _make_more(self) -> None:
        """Make one of the turns that are wanted, without moving the visible ones."""
        if self._first > self._wanted:
            self._make_earlier()
        else:
            self._more.stop()
        self._mark_last()
        from_end = self._from_end
        for _ in range(N_LAYOUTS):  # before the next frame, in which it would be seen elsewhere
            QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest)
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum() - from_end)

    def _make_earlier(self, *, is_growing: bool = False) -> None:
        """Make the turn before the first one that is shown; its answer may still be growing."""
        self._first -= 1
        view = self._make(self._first)
        if isinstance(view, AnswerView) and not is_growing:
            view.close_answer()
        self._views.insert(0, view)
        self._layout.insertWidget(1, view)

    def _make(self, index: int) -> MessageView:
        message: Message = self._chat.messages[index]
        if message.role == "user":
            user = UserView(message, self._column)
            user.fit_width(self._column_width())
            user.resent.connect(lambda text: self.resend_requested.emit(index, text))
            return user
        answer = AnswerView(message, self._column)
        answer.regenerate_requested.connect(self.regenerate_requested)
        answer.continue_requested.connect(self.continue_requested)
        return answer

    def _leave_out_oldest(self) -> None:
        """Take the oldest turns off the view, whose end is seen now."""
        n_over = max(0, len(self._views) - MOST_SHOWN)
        for view in self._views[:n_over]:
            self._remove(view)
        del self._views[:n_over]
        if n_over:
            self._first += n_over
            self._wanted = self._first

    def _remove(self, view: MessageView) -> None:
        self._layout.removeWidget(view)
        view.hide()
        view.deleteLater()

    def _mark_last(self) -> None:
        self._earlier.setVisible(self._first > 0 and not self._more.isActive())
        for view in self._views:
            if isinstance(view, AnswerView):
                view.set_last(view is self._views[-1])

    def _column_width(self) -> int:
        return min(COLUMN_WIDTH, max(200, self.width() - 2 * MARGIN))

    @Slot()
    def _follow(self) -> None:
        if self._is_following:
            self.scroll_to_end()

    @Slot()
    def _on_scrolled(self) -> None:
        bar = self.verticalScrollBar()
        self._from_end = bar.maximum() - bar.value()
        self._is_following = self._from_end <= STICKY_PIXELS

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        for view in self._views:
            if isinstance(view, UserView):
                view.fit_width(self._column_width())
