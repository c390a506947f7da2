"""The open chat's messages, in a scrolling column that follows a growing answer.

The column contains only a part of the path, so opening and streaming cost the same for every chat.
It starts with the last messages; scrolling or searching loads others. The visible part is created
immediately, the rest in small steps between events, as a message with code and tables takes about
30 ms. The visible part stays in place while messages are added and removed above and below it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from PySide6.QtCore import QCoreApplication, QEvent, QPoint, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QScrollArea, QWidget

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.message_column import MAX_SHOWN, N_SHOWN, TOP_PIXELS, MessageColumn
from app.core.process.spare_time import LaterSteps, spare_time
from app.core.translation import tr
from app.widgets.controls import keep_margin
from app.widgets.shortcuts import make_local_shortcut

if TYPE_CHECKING:
    from app.chat.images.album import ImageAlbum
    from app.chat.views.answer_view import AnswerView
    from app.chat.views.message_view import MessageView

N_AT_ONCE, AT_ONCE_S, MAX_AT_ONCE_S = 4, 0.015, 0.04
"""Limits for messages created immediately: `N_AT_ONCE`, or fewer if they fill the view; then more
until `AT_ONCE_S` of CPU time is used. Creation always stops after `MAX_AT_ONCE_S`."""

N_LAYOUTS = 4
"""Number of layout passes for positions to settle, as a text's height depends on its width."""

NEAR, FAR = 1, 4
"""Distances from an end, in view heights: messages are added within `NEAR` and removed beyond
`FAR`."""

MARGIN = 34
STICKY_PIXELS = 48


@dataclass(frozen=True, slots=True)
class _Held:
    # a message edge that stays in place while other messages are added and removed
    view: MessageView
    is_lower: bool  # whether it is the lower edge, as for views that grow at their top
    pixels: int  # below the top of the viewport

    @property
    def y(self) -> int:
        return self.view.y() + (self.view.height() if self.is_lower else 0)


class ChatView(QScrollArea):
    """View of a conversation's messages."""

    resend_requested = Signal(int, str)  # id of a question, text
    answer_edited = Signal(int, str)  # id of an answer, text
    step_chosen = Signal(object, int)  # MessageStep, id of a message
    version_chosen = Signal(int)  # id of a message
    continue_requested = Signal()
    call_chosen = Signal(object, int, str)  # CallStep, id of an answer, id of a call
    zoomed = Signal(int)  # 1: larger, -1: smaller
    screen_changed = Signal()  # the new screen has another device pixel ratio

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(tr("Conversation"))
        self._is_following = True
        self._held: _Held | None = None
        self._is_settling = False
        self._more = LaterSteps(self._make_more, self)
        self._column = MessageColumn()
        for name in ("resend_requested", "answer_edited", "step_chosen", "version_chosen"):
            getattr(self._column, name).connect(getattr(self, name))
        self._column.continue_requested.connect(self.continue_requested)
        self._column.call_chosen.connect(self.call_chosen)
        self._column.place_wanted.connect(self._show_place)
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
        for name, step in (("version-before", -1), ("version-after", 1)):
            make_local_shortcut(name, self, partial(self._switch, step))

    @property
    def shown(self) -> list[MessageView]:
        """The views in the column, from top to bottom."""
        return self._column.views

    def set_album(self, album: ImageAlbum) -> None:
        """Set the source of images."""
        self._column.album = album

    def show_chat(self, chat: Conversation, growing: Message | None = None) -> None:
        """Show the end of another chat; `growing` is its running answer, if any."""
        self._column.growing = growing
        self._column.chat = chat
        self._show_from(len(self._column.path))

    def show_path(self, growing: Message | None = None) -> None:
        """Show the chat's current messages; unchanged ones stay in place."""
        column, path = self._column, self._column.path
        column.growing = growing
        kept = {view.message.id for view in column.views}
        places = [place for place, message in enumerate(path) if message.id in kept]
        is_new = growing is not None and growing.id not in kept
        if not places or (is_new and places[-1] + N_AT_ONCE < len(path) - 1):
            self._show_from(len(path))
            return
        steps = {v.message.parent: s for v in column.views if (s := v.versions.focused_step)}
        last = len(path) if is_new else max(places[-1] + 1, min(len(path), places[0] + N_SHOWN))
        new = [place for place in range(places[0], last) if path[place].id not in kept]
        end = new[1] if len(new) > 1 and not is_new else last
        self._hold_one_of({path[place].id for place in places})
        with self._making():
            column.show_places(range(places[0], end))
        column.wanted = column.first, last
        if is_new:
            column.leave_out(max(0, len(column.views) - MAX_SHOWN))
        elif new:
            self._make_some(new[0] - column.first)
        self._is_following = is_new or (self._is_following and column.is_at_end)
        self._settle()
        self._more.start()  # even for a complete column, to check whether an end is near
        for view in column.views:
            if view.message.parent in steps:
                view.versions.take_focus(steps[view.message.parent])

    def show_message(self, message_id: int) -> None:
        """Scroll a message on the path to the top of the view."""
        column = self._column
        places = (n for n, message in enumerate(column.path) if message.id == message_id)
        if (place := next(places, None)) is None:
            return
        if not column.first <= place < column.end:
            self._show_from(place)
        self._is_following = False
        view = column.views[place - column.first]
        self._held = _Held(view, is_lower=False, pixels=TOP_PIXELS)
        self._settle()
        QTimer.singleShot(0, self, self._settle)  # once a new chat has been laid out

    def rebuild(self, message_id: int, growing: Message | None = None) -> None:
        """Recreate the view of a changed message."""
        self._column.growing = growing
        with self._making():
            self._column.rebuild(message_id)
        self._make_some(0)
        self._settle()
        self._more.start()

    def grow(self) -> None:
        """Show the new text of the running answer."""
        if (view := self._growing_view) is not None:
            view.grow()

    def set_status(self, text: str) -> None:
        """Show a status below the running answer."""
        if (view := self._growing_view) is not None:
            view.set_status(text)

    def close_answer(self, message_id: int) -> None:
        """Show an answer as finished, if it is in the column."""
        self._column.growing = None
        for view in self._answer_views(message_id):
            view.close_answer()

    def show_calls(self, message_id: int) -> None:
        """Show an answer's current calls, if the answer is in the column."""
        for view in self._answer_views(message_id):
            view.show_calls()

    def _answer_views(self, message_id: int) -> list[AnswerView]:
        views = [view for view in self._column.views if view.message.id == message_id]
        return [cast("AnswerView", view) for view in views if view.message.is_answer]

    def last_answer(self) -> AnswerView | None:
        """Return the view of the path's last message, if it is an answer in the column."""
        return self._column.last_answer

    @Slot()
    def scroll_to_end(self) -> None:
        """Scroll to the end of the path."""
        if not self._column.is_at_end:
            self._show_from(len(self._column.path))
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())

    @Slot(QPoint)
    def _show_place(self, place: QPoint) -> None:
        self._is_following = False
        at = self._column.mapFromGlobal(place)
        self.ensureVisible(at.x(), at.y(), 0, STICKY_PIXELS)

    @property
    def _growing_view(self) -> AnswerView | None:
        view, growing = self._column.last_answer, self._column.growing
        return view if view is not None and view.message is growing else None

    def _show_from(self, place: int) -> None:
        column = self._column
        column.start_at(place)
        self._is_following, self._held = place >= len(column.path), None
        self._make_some(0)
        column.mark()
        self._more.stop()
        if not column.is_complete:
            self._more.start()
        if self._is_following:
            QTimer.singleShot(0, self, self._follow)

    def _make_some(self, n_above: int) -> None:
        column, begin = self._column, time.thread_time()
        with self._making():
            while column.make_next():
                is_full = column.rough_height(column.first + n_above) >= self.viewport().height()
                is_enough = is_full or column.n_whole - n_above >= N_AT_ONCE
                if time.thread_time() - begin > (AT_ONCE_S if is_enough else MAX_AT_ONCE_S):
                    break

    @Slot()
    def _make_more(self) -> None:
        until = spare_time().until
        with self._making():
            is_over = not self._column.make_next()
            while time.thread_time() < until and self._column.make_next():
                pass
        if not is_over:
            self._settle()
            return
        self._more.stop()
        self._want_more()

    def _want_more(self) -> None:
        column, bar, height = self._column, self.verticalScrollBar(), self.viewport().height()
        if self._more.is_active or self._is_settling or not column.views:
            return
        is_near_top = bar.value() < NEAR * height and column.first > 0
        is_near_end = bar.maximum() - bar.value() < NEAR * height and not column.is_at_end
        if is_near_top or is_near_end:
            self._leave_out_far()
            first = max(0, column.first - N_SHOWN) if is_near_top else column.first
            end = min(len(column.path), column.end + N_SHOWN) if is_near_end else column.end
            column.wanted = first, end
            self._more.start()

    def _leave_out_far(self) -> None:
        bar, height, views = self.verticalScrollBar(), self.viewport().height(), self._column.views
        top, bottom = bar.value() - FAR * height, bar.value() + (FAR + 1) * height
        n_most = max(0, len(views) - MAX_SHOWN)
        n_last = sum(1 for _ in takewhile(lambda view: view.y() > bottom, reversed(views)))
        n_last = min(n_last, n_most)
        n_first = sum(1 for _ in takewhile(lambda view: view.geometry().bottom() < top, views))
        self._column.leave_out(min(n_first, n_most - n_last), n_last)
        self._settle()

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Suspend the scroll handler while the column changes."""
        self._is_settling = True
        with self._column.making():
            yield
        self._is_settling = False

    @Slot()
    def _settle(self) -> None:
        self._column.mark()
        self._is_settling = True
        for _ in range(N_LAYOUTS):
            QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest)
        bar = self.verticalScrollBar()
        if self._is_following:
            bar.setValue(bar.maximum())
        elif (held := self._held_here) is not None:
            bar.setValue(held.y - held.pixels)
        self._is_settling = False
        held = self._held_here
        if held is None or (held.is_lower and not self._column.is_growing_up(held.view)):
            self._note_place()

    @property
    def _held_here(self) -> _Held | None:
        held = self._held
        return held if held is not None and held.view in self._column.views else None

    @Slot()
    def _follow(self) -> None:
        if self._is_following and self._column.is_at_end:
            self.scroll_to_end()

    @Slot()
    def _on_scrolled(self) -> None:
        if not self._is_settling:
            bar = self.verticalScrollBar()
            is_low = bar.maximum() - bar.value() <= STICKY_PIXELS
            self._is_following = self._column.is_at_end and is_low
            self._note_place()
            self._want_more()

    def _note_place(self) -> None:
        self._held = None
        if self._column.views:
            self._hold_one_of({view.message.id for view in self._column.views})

    def _hold_one_of(self, ids: set[int]) -> None:
        if not self._is_following:
            top = self.verticalScrollBar().value()
            views = [view for view in self._column.views if view.message.id in ids]
            seen = (view for view in views if view.geometry().bottom() > top)
            view = next(seen, views[-1])
            held = _Held(view, is_lower=self._column.is_growing_up(view), pixels=0)
            self._held = replace(held, pixels=held.y - top)

    def _switch(self, step: int) -> None:
        focused = QApplication.focusWidget()
        views = [view for view in reversed(self._column.views) if view.versions.text]
        inside = (view for view in views if focused and view.isAncestorOf(focused))
        if (view := next(inside, views[0] if views else None)) is not None:
            view.versions.go(step)

    def event(self, event: QEvent) -> bool:
        if event.type() is QEvent.Type.DevicePixelRatioChange:
            self.screen_changed.emit()
        return super().event(event)

    def wheelEvent(self, event: QWheelEvent) -> None:
        turn = event.angleDelta().y()
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier and turn:
            self.zoomed.emit(1 if turn > 0 else -1)
            event.accept()
        else:
            super().wheelEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._column.fit_width(self.width() - 2 * MARGIN)
