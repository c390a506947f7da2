"""The banner: a notice inside the window, with at most one action."""

from __future__ import annotations

import time

from PySide6.QtCore import QEvent, QObject, QRect, Qt, QTimer, Slot
from PySide6.QtGui import QEnterEvent, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app.core.notice import Notice
from app.core.translation import tr
from app.widgets.buttons import IconButton, button
from app.widgets.layout import fill
from app.widgets.text import label
from app.widgets.theme import px, set_role

INFO_MS = 8000
ROLES = {"info": "", "warning": "warn", "error": "danger"}
GAP = 6  # distance of a floating banner from the page's edge, in pixels
NARROW = 420  # width in pixels below which the button is placed below the text


class Banner(QFrame):
    """Banner that shows one notice at a time; "info" notices disappear after a while.

    It does not change while the mouse is over it, so that clicks hit what the user aimed at.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self._notice: Notice | None = None
        self._shown_at = 0.0
        self._is_hovered = self._is_due = False
        self._next: Notice | None = None  # shown once the mouse leaves
        self._text, self._hint = label(), label(role="muted")
        for part in (self._text, self._hint):
            part.setWordWrap(True)
        self._action = button("")
        self._action.clicked.connect(self._act)
        close = IconButton("close", tr("Dismiss"), self, size=14)
        close.clicked.connect(self._close)
        texts = fill(QVBoxLayout(), self._text, self._hint, spacing=2)
        self._content = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        fill(self._content, (texts, 1), (self._action, 0, Qt.AlignmentFlag.AlignRight))
        parts = (self._content, 1), (close, 0, Qt.AlignmentFlag.AlignTop)
        fill(QHBoxLayout(self), *parts, margins=(14, 8, 8, 8))
        self._timer = QTimer(self, singleShot=True, interval=INFO_MS)
        self._timer.timeout.connect(self.dismiss)
        self.hide()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    @Slot(object)
    def show_notice(self, notice: Notice) -> None:
        """Show a notice, once the mouse is not over the current one."""
        if self._is_hovered:
            self._next, self._is_due = notice, True
            return
        self._notice, self._shown_at = notice, time.perf_counter()
        self._text.setText(notice.text)
        set_role(self._text, ROLES[notice.kind])
        set_role(self, notice.kind, "kind")
        self._hint.setText(notice.hint)
        self._hint.setVisible(bool(notice.hint))
        self._action.setText(notice.action)
        self._action.setVisible(bool(notice.action))
        self.setAccessibleName(self._text.text())
        self.setAccessibleDescription(self._hint.text())
        self.show()
        if notice.kind == "info" and not notice.stays:
            self._timer.start()
        else:
            self._timer.stop()

    @Slot()
    def dismiss(self) -> None:
        """Hide the notice, once the mouse is not over it."""
        self._timer.stop()
        self._is_due = self._is_hovered
        if not self._is_due:
            self._show_next()

    def _show_next(self) -> None:
        waiting, self._next = self._next, None
        self._is_due = self._is_hovered = False
        self._timer.stop()
        self._notice = None
        if waiting is not None:
            self.show_notice(waiting)
        else:
            self.hide()

    @Slot()
    def dismiss_load(self) -> None:
        """Hide an error or warning from the engine, because another load is starting."""
        if self._notice is not None and self._notice.is_of_engine:
            self.dismiss()

    def dismiss_failure(self, asked_at: float) -> None:
        """Hide an engine error that was shown before `asked_at`, the time an answer started."""
        notice = self._notice
        is_error = notice is not None and notice.is_of_engine and notice.kind == "error"
        if is_error and self._shown_at < asked_at:
            self.dismiss()

    def dismiss_chat(self, chat: str) -> None:
        """Hide the notice if it is about `chat`."""
        if self._notice is not None and self._notice.chat == chat:
            self.dismiss()

    def dismiss_page(self, page: str) -> None:
        """Hide the notice if it is about `page`."""
        if self._notice is not None and self._notice.page == page:
            self.dismiss()

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self._is_hovered = True

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self._is_hovered = False
        if self._is_due:
            self._show_next()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._is_hovered = False

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        direction = QBoxLayout.Direction
        is_narrow = self.width() < px(NARROW)
        self._content.setDirection(direction.TopToBottom if is_narrow else direction.LeftToRight)
        self._keep_height()

    def event(self, event: QEvent) -> bool:
        """Update the height when texts, fonts or the style change."""
        is_done = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._keep_height()
        return is_done

    def _keep_height(self) -> None:
        """Set the minimum height that fits all lines, which would otherwise overlap."""
        layout = self.layout()
        assert layout is not None
        self.setMinimumHeight(layout.totalHeightForWidth(self.width()))

    @Slot()
    def _close(self) -> None:
        notice = self._notice
        self._show_next()
        if notice is not None and notice.on_close is not None:
            notice.on_close()

    @Slot()
    def _act(self) -> None:
        notice = self._notice
        self._show_next()
        if notice is not None and notice.on_action is not None:
            notice.on_action()


class FloatingBanner(Banner):
    """Banner that floats over a page; `width` and `margin` are pixels at 100 %."""

    def __init__(self, page: QWidget, width: int, margin: int) -> None:
        super().__init__(page.parentWidget())
        self._page, self._max_width, self._margin = page, width, margin
        self._is_low = False
        page.installEventFilter(self)

    def set_low(self, is_low: bool) -> None:
        """Move to the bottom or top of the page."""
        self._is_low = is_low
        self._keep_height()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Resize, QEvent.Type.Move):
            self._keep_height()
        return super().eventFilter(watched, event)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._keep_height()

    def _keep_height(self) -> None:
        """Cover the page's edge, and be high enough for all lines."""
        if not self.isVisible():  # the layout would keep the previous text's height
            return
        super()._keep_height()
        page, height = self._page.geometry(), self.minimumHeight()
        width = min(px(self._max_width), page.width() - 2 * self._margin)
        place = QRect(0, 0, max(1, width), height)
        place.moveCenter(page.center())
        place.moveTop(page.bottom() + 1 - height - GAP if self._is_low else page.top() + GAP)
        self.setGeometry(place)
        self.raise_()
