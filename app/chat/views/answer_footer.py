"""The line below an answer: its versions, its figures, and the buttons for what can be done."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QWidget

from app.chat.branches.views.version_switch import VersionSwitch
from app.chat.message import Message
from app.chat.views.answer_texts import (
    FooterPart,
    can_continue,
    fitting_text,
    footer_of,
    joined,
)
from app.core.translation import tr
from app.widgets.buttons import IconButton, button
from app.widgets.text import ElidedLabel


class FiguresLabel(ElidedLabel):
    """Label of figures, of which the less important give way; its tool tip then has all."""

    def __init__(self, parent: QWidget) -> None:
        self._parts: Sequence[FooterPart] = ()
        super().__init__(parent=parent)

    @property
    def least_width(self) -> int:
        """Width of what stays longest, in pixels."""
        return self.fontMetrics().horizontalAdvance(fitting_text(self._parts, lambda _: False))

    def set_parts(self, parts: Sequence[FooterPart]) -> None:
        """Show figures."""
        self._parts = parts
        self.set_full_text(joined(parts))

    def set_line(self, text: str) -> None:
        """Show a line of text in place of figures."""
        self._parts = ()
        self.set_full_text(text)

    def shortened(self, text: str) -> str:
        if not self._parts:
            return super().shortened(text)
        measure = self.fontMetrics().horizontalAdvance
        return fitting_text(self._parts, lambda shown: measure(shown) <= self.width())


class AnswerFooter(QWidget):
    """The footer of an answer; its buttons come when the answer has ended.

    Args:
        versions: switch between the versions of the answer.

    Attributes:
        figures: how fast the answer came and why it ended, or what the engine does now.
        buttons: what can be done with the answer, beside the figures or below them.
    """

    copy_requested = Signal()
    again_requested = Signal()
    continue_requested = Signal()
    menu_requested = Signal(QWidget)  # the button that it belongs to

    def __init__(self, versions: VersionSwitch, parent: QWidget) -> None:
        super().__init__(parent)
        self._versions = versions
        self.figures = FiguresLabel(self)
        self.figures.setProperty("role", "muted")
        self.copy = button(tr("Copy"), "quiet", tr("Copy answer"))
        self.again = button(tr("Regenerate"), "quiet", tr("Regenerate answer"))
        self.go_on = button(tr("Continue"), "quiet", tr("Continue answer"))
        for made, wanted in (
            (self.copy, self.copy_requested), (self.again, self.again_requested),
            (self.go_on, self.continue_requested),
        ):  # fmt: skip
            made.clicked.connect(lambda _=False, signal=wanted: signal.emit())
        more = IconButton("more", tr("More for this answer"), self, size=16)
        more.clicked.connect(lambda: self.menu_requested.emit(more))
        self.buttons = QWidget(self)
        actions = QHBoxLayout(self.buttons)
        actions.setContentsMargins(0, 0, 0, 0)
        actions.setSpacing(0)
        for each in (self.copy, self.go_on, self.again, more):
            actions.addWidget(each)
        self.buttons.setMinimumWidth(1)  # it goes below the rest before the window gets wider
        self.buttons.hide()
        rest = QHBoxLayout()
        rest.addWidget(versions)
        rest.addWidget(self.figures, 1)
        self._layout = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.addLayout(rest, 1)
        versions.stackUnder(self.figures)  # read first
        self._layout.addWidget(self.buttons, 0, Qt.AlignmentFlag.AlignRight)

    def show_end(self, message: Message) -> None:
        """Show the figures and buttons of an answer that has ended."""
        self.figures.set_parts(footer_of(message))
        self.again.setText(tr("Retry") if message.is_cut_off else tr("Regenerate"))
        self.buttons.show()

    def show_actions(self, message: Message, *, is_last: bool, is_followed: bool) -> None:
        """Offer to continue or replace the last answer only; show nothing where it goes on.

        Args:
            is_followed: whether the same answer goes on in the next message.
        """
        self.again.setVisible(is_last)
        self.go_on.setVisible(is_last and can_continue(message))
        for part in (self.figures, self.copy):
            part.setVisible(not is_followed)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        """Put the buttons below the figures where one line has no room for both."""
        needed = self.buttons.sizeHint().width() + self.figures.least_width
        needed += max(0, self._layout.spacing())
        if not self._versions.isHidden():
            needed += self._versions.sizeHint().width()
        direction = QBoxLayout.Direction
        is_narrow = needed > self.width()
        self._layout.setDirection(direction.TopToBottom if is_narrow else direction.LeftToRight)
