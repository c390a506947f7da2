"""Chips that stand for files: those of a draft can be removed or cut, those of a message not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMenu, QWidget

from app.chat.attachments.attachment import Attachment
from app.chat.attachments.draft import DraftFile, FilePart
from app.core.translation import tr, tr_n
from app.core.units import decimal_size
from app.widgets.buttons import IconButton, button
from app.widgets.layout import FlowBox
from app.widgets.text import ElidedLabel, caption_text, label, set_tip
from app.widgets.theme import set_role
from engine import one_line

MOST_NAME: Final = 36
"""Largest number of characters of a file's name on a chip."""

MOST_LISTED: Final = 30
"""Largest number of parts in the menu of a file that is too large."""

MOST_TIP: Final = 600


def details(n_bytes: int, n_tokens: int | None, part: int = 1, n_parts: int = 1) -> str:
    """Return what a chip says behind the name: "part 2 of 3 · 12.3 kB · 3,100 tokens"."""
    parts = [tr("part {n} of {total}").format(n=part, total=n_parts)] if n_parts > 1 else []
    parts.append(decimal_size(n_bytes))
    if n_tokens:
        parts.append(tr_n("{n} token", "{n} tokens", n_tokens))
    return " · ".join(parts)


class FileChip(QFrame):
    """Chip of a file that goes with a message."""

    def __init__(self, name: str, more: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "fileChip")
        shown = one_line(name, MOST_NAME)
        self.setAccessibleName(f"{shown}, {more}")
        self.name, self.more = label(shown), ElidedLabel(more)
        self.more.setProperty("role", "muted")
        self.row = QHBoxLayout(self)
        self.row.setContentsMargins(10, 4, 6, 4)
        self.row.setSpacing(6)
        self.row.addWidget(self.name)
        self.row.addWidget(self.more)


class DraftChip(FileChip):
    """Chip of a file that shall go with the next message."""

    removed = Signal(object)  # DraftFile
    part_chosen = Signal(object, object, int)  # DraftFile, all parts, number from 1
    pages_wanted = Signal(object)  # DraftFile whose pages shall go as pictures

    def __init__(
        self, file: DraftFile, parts: tuple[FilePart, ...], *, is_too_large: bool,
        sees_pages: bool = False,
    ) -> None:  # fmt: skip
        known = file.file
        more = details(known.n_bytes, file.n_tokens, file.number, file.n_parts) if known else ""
        super().__init__(file.path.name, more or tr("reading…"))
        self.file, self._parts = file, parts
        set_tip(self, str(file.path))
        if is_too_large:
            set_role(self.more, "danger")
        if parts:
            self.choose = button(
                tr("Choose part…"), "chip",
                tr("Choose a part of {name}").format(name=self.name.text()),
            )  # fmt: skip
            self.choose.clicked.connect(self._offer)
            self.row.addWidget(self.choose)
        if sees_pages:
            pages = button(
                tr("As pictures"), "chip",
                tr("Attach the pages of {name} as pictures").format(name=self.name.text()),
            )  # fmt: skip
            pages.clicked.connect(lambda: self.pages_wanted.emit(self.file))
            self.row.addWidget(pages)
        remove = IconButton("close", tr("Remove {name}").format(name=self.name.text()), size=12)
        remove.clicked.connect(lambda: self.removed.emit(self.file))
        self.row.addWidget(remove)

    def menu(self) -> QMenu:
        """Return the menu of the parts."""
        menu = QMenu(self)
        text = self.file.file.text if self.file.file else ""
        for number, part in enumerate(self._parts[:MOST_LISTED], 1):
            begins = one_line(text[part.start : part.start + 200], 40)
            title = tr("Part {n} of {total} · {tokens} tokens · {begins}").format(
                n=number, total=len(self._parts), tokens=part.n_tokens, begins=begins
            )
            action = menu.addAction(caption_text(title, 100))
            action.triggered.connect(
                lambda _=False, n=number: self.part_chosen.emit(self.file, self._parts, n)
            )
        return menu

    def _offer(self) -> None:
        self.menu().popup(self.choose.mapToGlobal(self.choose.rect().bottomLeft()))


def message_chips(files: Sequence[Attachment], parent: QWidget) -> FlowBox:
    """Return the chips of a message that was sent."""
    box = FlowBox(parent)
    chips = []
    for file in files:
        more = details(file.n_bytes, file.n_tokens, file.part, file.n_parts)
        chip = FileChip(file.name, more)
        set_tip(chip, file.text[:MOST_TIP])
        chips.append(chip)
    box.set_widgets(chips)
    return box
