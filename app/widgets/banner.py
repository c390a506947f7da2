"""The banner: a notice inside the window, with at most one button; it may lie over a page."""

from __future__ import annotations

import time

from PySide6.QtCore import QEvent, QObject, QRect, Qt, QTimer, Slot
from PySide6.QtGui import QEnterEvent, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app.core.notice import Notice
from app.core.translation import tr
from app.widgets.buttons import IconButton, button
from app.widgets.text import label
from app.widgets.theme import px, set_role

INFO_MS = 8000
ROLES = {"info": "", "warning": "warn", "error": "danger"}
GAP = 6
"""Distance of a banner from the edge of the page that it lies over, in pixels."""
NARROW = 420
"""Width of a banner below which its button is under the text, in pixels."""


class Banner(QFrame):
    """Banner that shows one notice at a time; mere information disappears after a while.

    While the mouse is over it, it stays as it is: a click must not hit something else.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self._notice: Notice | None = None
        self._shown_at = 0.0
        self._is_hovered = self._is_due = False
        self._next: Notice | None = None  # what is shown once the mouse is elsewhere
        self._text, self._hint = label(), label(role="muted")
        for part in (self._text, self._hint):
            part.setWordWrap(True)
        self._action = button("")
        self._action.clicked.connect(self._act)
        close = IconButton("close", tr("Dismiss"), self, size=14)
        close.clicked.connect(self._close)
        texts = QVBoxLayout()
        texts.setSpacing(2)
        texts.addWidget(self._text)
        texts.addWidget(self._hint)
        self._content = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._content.addLayout(texts, 1)
        self._content.addWidget(self._action, 0, Qt.AlignmentFlag.AlignRight)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(14, 8, 8, 8)
        layout.addLayout(self._content, 1)
        layout.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        self._timer = QTimer(self, singleShot=True, interval=INFO_MS)
        self._timer.timeout.connect(self.dismiss)
        self.hide()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    @Slot(object)
    def show_notice(self, notice: Notice) -> None:
        """Show a notice in place of the one before, once the mouse is not over that."""
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
            self._go_on()

    def _go_on(self) -> None:
        """Hide the notice, and show the one that has waited, if any."""
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
        """Hide an error or a warning of the engine, as another load begins."""
        if self._notice is not None and self._notice.is_of_engine:
            self.dismiss()

    def dismiss_failure(self, asked_at: float) -> None:
        """Hide an error of the engine, which has answered meanwhile.

        Args:
            asked_at: when that was asked for, by `time.perf_counter`: an error of something else,
                told since then, stays.
        """
        notice = self._notice
        is_error = notice is not None and notice.is_of_engine and notice.kind == "error"
        if is_error and self._shown_at < asked_at:
            self.dismiss()

    def dismiss_chat(self, chat: str) -> None:
        """Hide a notice about the answer or the draft of a chat, which is left now."""
        if self._notice is not None and self._notice.chat == chat:
            self.dismiss()

    def dismiss_page(self, page: str) -> None:
        """Hide a notice about a page, which is left now."""
        if self._notice is not None and self._notice.page == page:
            self.dismiss()

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self._is_hovered = True

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self._is_hovered = False
        if self._is_due:
            self._go_on()

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
        """Keep the height whenever texts, fonts or the style have changed it."""
        is_done = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._keep_height()
        return is_done

    def _keep_height(self) -> None:
        """Ask for room for all lines; a layout without it would squeeze them into each other."""
        layout = self.layout()
        assert layout is not None
        self.setMinimumHeight(layout.totalHeightForWidth(self.width()))

    @Slot()
    def _close(self) -> None:
        notice = self._notice
        self._go_on()
        if notice is not None and notice.on_close is not None:
            notice.on_close()

    @Slot()
    def _act(self) -> None:
        notice = self._notice
        self._go_on()
        if notice is not None and notice.on_action is not None:
            notice.on_action()


class FloatingBanner(Banner):
    """Banner that lies over a page, so that nothing below it moves when it comes or goes.

    Args:
        page: what it lies over.
        width: its largest width, and `margin` its distance from the page's sides, in pixels at
            100 %.
    """

    def __init__(self, page: QWidget, width: int, margin: int) -> None:
        super().__init__(page.parentWidget())
        self._page, self._most, self._margin = page, width, margin
        self._is_low = False
        page.installEventFilter(self)

    def set_low(self, is_low: bool) -> None:
        """Lie over the end of the page, or its beginning."""
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
        """Take the place over the page, as high as all lines are."""
        if not self.isVisible():  # its layout would keep the height of a text that is not shown
            return
        super()._keep_height()
        page, height = self._page.geometry(), self.minimumHeight()
        width = min(px(self._most), page.width() - 2 * self._margin)
        place = QRect(0, 0, max(1, width), height)
        place.moveCenter(page.center())
        place.moveTop(page.bottom() + 1 - height - GAP if self._is_low else page.top() + GAP)
        self.setGeometry(place)
        self.raise_()
