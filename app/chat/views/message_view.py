"""The base class for message views, and the view of a user's message, a bubble."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, Qt, Signal, Slot
from PySide6.QtGui import QEnterEvent
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.chat.markdown import TextLine, TextSpan
from app.chat.message import Message
from app.chat.views.message_body import rough_lines
from app.chat.views.message_parts import MessageStep, TurnEditor, VersionSwitch, step_menu
from app.chat.views.prose_view import ProseView
from app.core.translation import tr
from app.widgets.buttons import HoverButton
from app.widgets.row_table import place_among
from app.widgets.theme import px

if TYPE_CHECKING:
    from app.chat.images.album import ImageAlbum
    from app.chat.views.chips import ImageTiles

BUTTONS_WIDTH = 110
"""Width in pixels of the buttons next to a bubble."""

CHIPS_WIDTH, MAX_WIDTH = 300, 10_000
"""Minimum width of a bubble with files, and ideal width of a bubble with a long text."""

MAX_SHEET = 4000
"""Maximum number of characters from a user's message in one text view."""


def sheets(text: str) -> Iterator[str]:
    """Split a text into parts for text views, preferably at line ends."""
    at = 0
    while len(text) - at > MAX_SHEET:
        cut = text.rfind("\n", at, at + MAX_SHEET)
        end = cut if cut > at else at + MAX_SHEET
        yield text[at:end]
        at = end + (cut > at)
    yield text[at:]


class MessageView(QWidget):
    """Base class for message views, filled in small steps, from the end if `grows_up`."""

    step_chosen = Signal(object)  # any MessageStep but `EDIT`
    version_chosen = Signal(int)  # id of another version
    edited = Signal(str)  # new text

    def __init__(
        self, message: Message, parent: QWidget | None = None, *, grows_up: bool = False
    ) -> None:
        super().__init__(parent)
        self.message, self.grows_up = message, grows_up
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._hovered: list[HoverButton] = []
        self.versions = VersionSwitch(self)
        self.versions.chosen.connect(self.version_chosen)
        self._editor: TurnEditor | None = None

    def make_next(self) -> bool:
        """Show the next part of the message; return False if none is left."""
        raise NotImplementedError

    @property
    def n_lines(self) -> int:
        """Estimated number of lines on screen so far."""
        raise NotImplementedError

    def fit_width(self, width: int) -> None:
        """Fit into the column's width (in pixels); answers fill it."""

    def set_last(self, is_last: bool) -> None:
        """Set whether this is the last message in the chat."""

    def set_followed(self, is_followed: bool) -> None:
        """Set whether the next message continues this answer after call results."""

    @Slot()
    def start_editing(self) -> None:
        """Replace the text with an editor."""
        if self._editor is None:
            self._editor = TurnEditor(self.copied_text, self, is_answer=self.message.is_answer)
            self._editor.accepted.connect(self._accept)
            self._editor.cancelled.connect(self.stop_editing)
            self._show_editor(self._editor)
            self._editor.edit.setFocus()

    @Slot()
    def stop_editing(self) -> None:
        """Show the text again."""
        if self._editor is not None:
            self._editor.hide()
            self._editor.deleteLater()
            self._editor = None
            self._hide_editor()

    def _show_editor(self, editor: TurnEditor) -> None:
        raise NotImplementedError

    def _hide_editor(self) -> None:
        raise NotImplementedError

    @Slot(str)
    def _accept(self, text: str) -> None:
        self.stop_editing()
        self.edited.emit(text)

    def _show_menu(self, button: QWidget) -> None:
        menu = step_menu(button, is_answer=self.message.is_answer, on_step=self._on_step)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    def _on_step(self, step: MessageStep) -> None:
        if step is MessageStep.EDIT:
            self.start_editing()
        else:
            self.step_chosen.emit(step)

    def add_hover_button(self, made: HoverButton) -> HoverButton:
        self._hovered.append(made)
        return made

    @property
    def copied_text(self) -> str:
        """The text to copy or edit."""
        return self.message.content

    @Slot()
    def copy(self) -> None:
        QApplication.clipboard().setText(self.copied_text)

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        for made in self._hovered:
            made.set_shown(True)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        for made in self._hovered:
            made.set_shown(False)


class UserView(MessageView):
    """View of a user's message: a bubble on the right that can turn into an editor."""

    def __init__(
        self, message: Message, parent: QWidget | None = None, *, grows_up: bool = False,
        album: ImageAlbum | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, parent, grows_up=grows_up)
        self.setAccessibleName(tr("Your message"))
        self._waiting = list(sheets(message.content)) if message.content else []
        self._sheets: list[ProseView] = []
        self._ideal: int | None = None
        self._texts = QVBoxLayout()
        self._texts.setSpacing(0)
        self._bubble = QFrame(self)
        self._bubble.setProperty("role", "userBubble")
        self._tiles: ImageTiles | None = None
        self._album = album
        self._fill_bubble()
        self.make_next()

        copy = self.add_hover_button(HoverButton("copy", tr("Copy message"), self))
        copy.clicked.connect(self.copy)
        edit = self.add_hover_button(HoverButton("edit", tr("Edit and send again"), self))
        edit.clicked.connect(self.start_editing)
        more = self.add_hover_button(HoverButton("more", tr("More for this message"), self))
        more.clicked.connect(lambda: self._show_menu(more))
        self._row = QHBoxLayout()
        self._row.setSpacing(2)
        self._row.addStretch(1)
        for made in self._hovered:
            self._row.addWidget(made, 0, Qt.AlignmentFlag.AlignBottom)
        self._row.addSpacing(4)
        self._row.addWidget(self._bubble)
        self._outer = QVBoxLayout(self)
        self._outer.setContentsMargins(0, 0, 0, 0)
        self._outer.setSpacing(2)
        self._outer.addLayout(self._row)
        self._outer.addWidget(self.versions, 0, Qt.AlignmentFlag.AlignRight)
        self.versions.raise_()  # screen readers read it last

    def _fill_bubble(self) -> None:
        message = self.message
        inner = QVBoxLayout(self._bubble)
        inner.setContentsMargins(14, 11, 14, 7)
        if message.pictures and self._album is not None:
            from app.chat.views.chips import ImageTiles  # late: most messages have no images

            self._tiles = ImageTiles(message.pictures, self._album, self._bubble)
            inner.addWidget(self._tiles)
        if message.attachments:
            from app.chat.views.chips import message_chips  # late: most messages have no files

            inner.addWidget(message_chips(message.attachments, self._bubble))
        inner.addLayout(self._texts)

    @Slot()
    def copy(self) -> None:
        """Copy the text or, if there is none, the first image."""
        pictures = self.message.pictures
        if pictures and not self.message.content and self._album is not None:
            self._album.copy(pictures[0])
        else:
            super().copy()

    def make_next(self) -> bool:
        if not self._waiting:
            return False
        sheet = ProseView(self)
        sheet.setAccessibleName(tr("Your message"))
        sheet.write([TextLine((TextSpan(self._waiting.pop(-1 if self.grows_up else 0)),))])
        self._texts.insertWidget(0 if self.grows_up else -1, sheet)
        number = 0 if self.grows_up else len(self._sheets)
        self._sheets.insert(number, sheet)
        place_among(self._sheets, number)
        sheet.show()
        return True

    @property
    def n_lines(self) -> int:
        return sum(rough_lines(sheet.plain_text) for sheet in self._sheets)

    def _ideal_width(self) -> int:
        if self._waiting or len(self._sheets) != 1:
            return MAX_WIDTH if self._sheets else 0
        if self._ideal is None:
            document = self._sheets[0].document().clone(self)
            document.setTextWidth(-1)
            self._ideal = int(document.idealWidth())
            document.deleteLater()
        return self._ideal

    def fit_width(self, width: int) -> None:
        """Make the bubble as wide as its text, but at most four fifths of the column."""
        wanted = self._ideal_width() + 30
        least = px(CHIPS_WIDTH) if self.message.attachments else 48
        if self._tiles is not None:
            least = max(least, self._tiles.ideal_width + 30)
        most = min(int(width * 0.8), width - px(BUTTONS_WIDTH))
        self._bubble.setFixedWidth(max(48, min(max(wanted, least), most)))

    def _show_editor(self, editor: TurnEditor) -> None:
        self._set_row_visible(False)
        self._outer.insertWidget(1, editor)

    def _hide_editor(self) -> None:
        self._set_row_visible(True)

    def _set_row_visible(self, visible: bool) -> None:
        for widget in (self._bubble, *self._hovered):
            widget.setVisible(visible)
