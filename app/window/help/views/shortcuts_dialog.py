"""The list of all shortcuts."""

from __future__ import annotations

from PySide6.QtCore import Qt, Slot
from PySide6.QtWidgets import QFrame, QGridLayout, QScrollArea, QWidget

from app.core.translation import tr
from app.widgets.page_dialog import PageDialog, search_field
from app.widgets.shortcuts import SHORTCUTS, shown_keys
from app.widgets.text import PlainLabel, label


class ShortcutsDialog(PageDialog):
    """Shortcuts by where they work, with a search.

    Attributes:
        rows: labels of each shortcut: its text and its keys.
    """

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("Shortcuts"), parent, (520, 640))
        self.search = search_field(tr("Search shortcuts"))
        self.head.addWidget(self.search)
        self.rows: dict[str, tuple[PlainLabel, PlainLabel]] = {}
        self._headings: dict[str, PlainLabel] = {}
        content = QWidget()
        grid = QGridLayout(content)
        grid.setContentsMargins(0, 0, 12, 0)
        grid.setColumnStretch(0, 1)
        for name, shortcut in SHORTCUTS.items():
            if shortcut.group not in self._headings:
                heading = self._headings[shortcut.group] = label(tr(shortcut.group), "heading")
                heading.setContentsMargins(0, 10, 0, 0)
                grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
            text, keys = label(tr(shortcut.text)), label(" · ".join(_told(name)), "muted")
            text.setWordWrap(True)
            row = grid.rowCount()
            grid.addWidget(text, row, 0)
            grid.addWidget(keys, row, 1, Qt.AlignmentFlag.AlignRight)
            self.rows[name] = (text, keys)
        grid.setRowStretch(grid.rowCount(), 1)
        scroll = QScrollArea()
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setWidgetResizable(True)
        scroll.setWidget(content)
        scroll.setAccessibleName(tr("Shortcuts"))
        self.set_content(scroll)
        self.search.textChanged.connect(self.filter)

    @Slot(str)
    def filter(self, words: str) -> None:
        """Show the shortcuts that have all of these words."""
        wanted = words.casefold().split()
        found: set[str] = set()
        for name, labels in self.rows.items():
            text = " ".join(part.text() for part in labels).casefold()
            is_found = all(word in text for word in wanted)
            for part in labels:
                part.setVisible(is_found)
            if is_found:
                found.add(SHORTCUTS[name].group)
        for group, heading in self._headings.items():
            heading.setVisible(group in found)


def _told(name: str) -> list[str]:
    """Return the keys for people: "1" to "9" are one."""
    keys = shown_keys(name)
    return keys if len(keys) <= 4 else [f"{keys[0]} – {keys[-1]}"]
