"""A column with views of consecutive messages in a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from PySide6.QtCore import QEvent, QPoint, Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.widgets.layout import scaled
from app.widgets.row_table import place_among
from app.widgets.theme import px

if TYPE_CHECKING:
    from app.chat.images.album import ImageAlbum
    from app.chat.views.answer_view import AnswerView
    from app.chat.views.message_view import MessageView

COLUMN_WIDTH = 760
"""Maximum width of the column in pixels."""

TOP_PIXELS = 20
"""Distance from the top to the first message, and to a message that was scrolled to."""

N_SHOWN = 30
"""Number of messages loaded when a chat opens or is scrolled to an end."""

MAX_SHOWN = 40
"""Number of messages kept when others are added, as each one slows a growing answer down."""

LINE_PIXELS = 16
"""Estimated height of a line."""


class MessageColumn(QWidget):
    """Views of a part of the path; a *place* is the index of a message on the path.

    Attributes:
        growing: the running answer, or None.
        first, end: place of the first view, and the place after the last one.
        wanted: target values of `first` and `end`.
    """

    resend_requested = Signal(int, str)  # id of a question, text
    answer_edited = Signal(int, str)  # id of an answer, text
    step_chosen = Signal(object, int)  # MessageStep, id of a message
    version_chosen = Signal(int)  # id of a message
    continue_requested = Signal()
    call_chosen = Signal(object, int, str)  # CallStep, id of an answer, id of a call
    place_wanted = Signal(QPoint)  # target of a link within an answer, in global coordinates

    def __init__(self) -> None:
        super().__init__()
        scaled(self, self.setMaximumWidth, COLUMN_WIDTH)
        self.chat = Conversation()
        self._width = px(COLUMN_WIDTH)
        self.views: list[MessageView] = []
        self.growing: Message | None = None
        self.album: ImageAlbum | None = None
        self.first = self.end = 0
        self.wanted = 0, 0
        self._unmade: list[MessageView] = []  # incomplete views
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, TOP_PIXELS, 0, 24)
        self._layout.setSpacing(18)
        self._layout.addStretch(1)

    @property
    def path(self) -> Sequence[Message]:
        """The messages on the chat's path."""
        return self.chat.messages

    @property
    def is_at_end(self) -> bool:
        """Whether the column ends with the last message of the path."""
        return self.end == len(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether all wanted messages are shown completely."""
        return (self.first, self.end) == self.wanted and not self._unmade

    @property
    def n_whole(self) -> int:
        """The number of complete views."""
        return len(self.views) - len(self._unmade)

    @property
    def last_answer(self) -> AnswerView | None:
        """The view of the path's last message, if it is an answer in the column."""
        last = self.views[-1] if self.views and self.is_at_end else None
        return cast("AnswerView", last) if last is not None and last.message.is_answer else None

    def rough_height(self, place: int) -> int:
        """Estimate the height in pixels of the views from a place on, before they are laid out."""
        return sum(view.n_lines for view in self.views[place - self.first :]) * LINE_PIXELS

    def start_at(self, place: int) -> None:
        """Remove all views; request those around a place, or the last ones if it is the end."""
        for view in self.views:
            self._remove(view)
        self.views, n = [], len(self.path)
        self.first = self.end = place
        start = max(0, place - N_SHOWN // 2) if place < n else max(0, n - N_SHOWN)
        self.wanted = start, min(n, start + N_SHOWN)

    def make_next(self) -> bool:
        """Take a step towards the wanted views; return False if none is left.

        Views further down are created first, and views further up are filled from their end.
        """
        if self._unmade:
            if not self._unmade[0].make_next():
                del self._unmade[0]
        elif self.end < self.wanted[1]:
            self._put(len(self.views), self._make(self.end))
            self.end += 1
        elif self.first > self.wanted[0]:
            self.first -= 1
            self._put(0, self._make(self.first, grows_up=True))
        else:
            return False
        return True

    @contextmanager
    def making(self) -> Iterator[None]:
        """Suspend the layout during the `with` block."""
        self._layout.setEnabled(False)
        try:
            yield
        finally:
            self._layout.setEnabled(True)
            self._layout.invalidate()
            self._make_room()

    def is_growing_up(self, view: MessageView) -> bool:
        """Return whether a view is still growing at its top."""
        return view.grows_up and view in self._unmade

    def show_places(self, places: Sequence[int]) -> None:
        """Show the messages at consecutive places, reusing existing views."""
        messages = {place: self.path[place] for place in places}
        kept = {view.message.id: view for view in self.views}
        ids = {message.id for message in messages.values()}
        for number, view in kept.items():
            if number not in ids:
                self._remove(view)
        self.views = []
        for place, message in messages.items():
            self._put(len(self.views), kept.get(message.id) or self._make(place))
        self.first, self.end = places[0], places[-1] + 1

    def rebuild(self, message_id: int) -> None:
        """Recreate the view of a changed message."""
        for number, view in enumerate(self.views):
            if view.message.id == message_id:
                self._remove(self.views.pop(number))
                self._put(number, self._make(self.first + number))
                break

    def leave_out(self, n_first: int, n_last: int = 0) -> None:
        """Remove some of the first and last views."""
        n_kept = len(self.views) - n_last
        for view in (*self.views[:n_first], *self.views[n_kept:]):
            self._remove(view)
        self.views = self.views[n_first:n_kept]
        self.first, self.end = self.first + n_first, self.end - n_last
        self.wanted = self.first, self.end

    def mark(self) -> None:
        """Update the version switches and footers of all views."""
        last = self.last_answer
        following = (*self.path[self.first + 1 :], None)
        for view, after in zip(self.views, following, strict=False):
            goes_on = bool(view.message.calls) and after is not None and after.is_answer
            view.set_followed(goes_on)
            versions = [message.id for message in self.chat.tree.versions(view.message.id)]
            view.versions.set_versions(versions, view.message.id)
            view.set_last(view is last)

    def fit_width(self, width: int) -> None:
        """Fit the bubbles into a width (in pixels)."""
        self._width = min(px(COLUMN_WIDTH), max(200, width))
        for view in self.views:
            view.fit_width(self._width)

    def event(self, event: QEvent) -> bool:
        if event.type() is QEvent.Type.LayoutRequest and self._layout.isEnabled():
            self._make_room()
        return super().event(event)

    def _make_room(self) -> None:
        # grow before the layout runs, or Qt would first squeeze all views into the old height
        wanted = self.heightForWidth(self.width())
        height = wanted if wanted >= 0 else self.minimumSizeHint().height()
        parent = self.parentWidget()
        if parent is not None and height > self.height():
            parent.resize(parent.width(), parent.height() + height - self.height())

    def _make(self, place: int, *, grows_up: bool = False) -> MessageView:
        from app.chat.views.answer_view import AnswerView  # late: an empty chat needs neither
        from app.chat.views.message_view import UserView

        message = self.path[place]
        view: MessageView
        if message.is_answer:
            view = answer = AnswerView(message, self, grows_up=grows_up)
            answer.continue_requested.connect(self.continue_requested)
            answer.call_chosen.connect(
                lambda step, call_id: self.call_chosen.emit(step, message.id, call_id)
            )
            answer.body.place_wanted.connect(self.place_wanted)
            answer.edited.connect(lambda text: self.answer_edited.emit(message.id, text))
            if message is not self.growing:
                answer.close_answer()
        else:
            view = question = UserView(message, self, grows_up=grows_up, album=self.album)
            question.fit_width(self._width)
            question.edited.connect(lambda text: self.resend_requested.emit(message.id, text))
        view.step_chosen.connect(lambda step: self.step_chosen.emit(step, message.id))
        view.version_chosen.connect(self.version_chosen)
        self._unmade.append(view)
        return view

    def _put(self, number: int, view: MessageView) -> None:
        self.views.insert(number, view)
        if self._layout.indexOf(view) != number:
            self._layout.insertWidget(number, view)
            view.resize(self.width(), view.height())
            view.show()  # Qt would only do so after the next layout
        place_among(self.views, number)

    def _remove(self, view: MessageView) -> None:
        if view in self._unmade:
            self._unmade.remove(view)
        self._layout.removeWidget(view)
        view.hide()
        view.deleteLater()
