"""The turns of the open chat, in a scrolling column that follows an answer as it grows.

Long chats open with their last turns; earlier ones are created on request, so that
opening costs the same for every chat.
"""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer, Signal, Slot
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.chat.conversation import Conversation, Message
from app.chat.views.message_view import AnswerView, MessageView, UserView
from app.widgets.buttons import button
from app.widgets.controls import keep_margin

N_SHOWN = 30
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
        self._earlier = button("Show earlier messages", "quiet")
        self._earlier.clicked.connect(self.show_earlier)
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
        self._first = max(0, len(chat.messages) - N_SHOWN)
        for index in range(self._first, len(chat.messages)):
            self._views.append(self._make(index))
            self._layout.insertWidget(self._layout.count() - 1, self._views[-1])
        last = len(chat.messages) - 1
        for index, view in enumerate(self._views, self._first):
            if isinstance(view, AnswerView) and not (is_answering and index == last):
                view.close_answer()
        self._mark_last()
        self._is_following = True
        QTimer.singleShot(0, self, self.scroll_to_end)

    def add_message(self, index: int) -> None:
        """Show the turn added at the end; an answer is growing at first."""
        view = self._make(index)
        self._views.append(view)
        self._layout.insertWidget(self._layout.count() - 1, view)
        self._mark_last()
        self._is_following = True

    def cut(self, n_messages: int) -> None:
        """Show only the first `n_messages` turns."""
        n_kept = max(0, n_messages - self._first)
        for view in self._views[n_kept:]:
            self._remove(view)
        del self._views[n_kept:]
        self._first = min(self._first, n_messages)
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
        from_end = bar.maximum() - bar.value()
        self._is_following = False
        first = max(0, self._first - N_SHOWN)
        for index in reversed(range(first, self._first)):
            view = self._make(index)
            if isinstance(view, AnswerView):
                view.close_answer()
            self._views.insert(0, view)
            self._layout.insertWidget(1, view)
        self._first = first
        self._mark_last()
        QTimer.singleShot(0, self, lambda: bar.setValue(bar.maximum() - from_end))

    @Slot()
    def scroll_to_end(self) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())

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

    def _remove(self, view: MessageView) -> None:
        self._layout.removeWidget(view)
        view.hide()
        view.deleteLater()

    def _mark_last(self) -> None:
        self._earlier.setVisible(self._first > 0)
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
        self._is_following = bar.value() >= bar.maximum() - STICKY_PIXELS

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        for view in self._views:
            if isinstance(view, UserView):
                view.fit_width(self._column_width())
