"""The log, filtered by level and words, and a report without anything private."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QComboBox, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page, search_field
from app.widgets.text import label, set_tip
from engine import printable

LEVELS: Final = ("INFO", "WARNING", "ERROR")
LEVEL = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
RANKS: Final = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2, "CRITICAL": 2}
"""Levels in order; a line without one belongs to the line before, as in a traceback."""


class LogDialog(PageDialog):
    """Page of the log's last lines."""

    copy_requested = Signal()
    refresh_requested = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("Log"), parent, (860, 560))
        self._lines: tuple[str, ...] = ()
        self.level = QComboBox()
        self.level.setAccessibleName(tr("Level"))
        for text in (tr("All"), tr("Warnings and errors"), tr("Errors")):
            self.level.addItem(text)
        self.search = search_field(tr("Search the log"))
        again = button(tr("Refresh"), "quiet")
        again.setAutoDefault(False)
        again.clicked.connect(self.refresh_requested)
        self.head.addWidget(self.search, 1)
        self.head.addWidget(self.level)
        self.head.addWidget(again)
        self.text = plain_page(tr("Log"))
        self.set_content(self.text)
        self.copy = button(tr("Copy diagnostics"), "primary")
        self.copy.setAutoDefault(False)
        set_tip(
            self.copy,
            tr("Versions, devices, settings and the last lines of the log, without chats, folders, "
               "names and tokens"),
        )  # fmt: skip
        self.copy.clicked.connect(self.copy_requested)
        self._status = label(role="muted")
        self.foot.insertWidget(0, self.copy)
        self.foot.insertWidget(1, self._status)
        self.level.currentIndexChanged.connect(self._show)
        self.search.textChanged.connect(self._show)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show these lines, the newest last, as the filters allow."""
        self._lines = tuple(lines)
        self._show()

    def say(self, text: str) -> None:
        """Say what has been done."""
        self._status.setText(text)

    @Slot()
    def _show(self) -> None:
        found = filtered(self._lines, self.level.currentIndex(), self.search.text())
        self.text.setPlainText(printable("\n".join(found)) or tr("There is nothing here."))
        bar = self.text.verticalScrollBar()
        bar.setValue(bar.maximum())


def filtered(lines: Sequence[str], least: int, words: str) -> list[str]:
    """Return the records of at least a level that have all words, whole with their tracebacks.

    Args:
        least: index in `LEVELS`.
    """
    wanted = words.casefold().split()
    records: list[list[str]] = []
    for line in lines:
        if LEVEL.match(line) or not records:
            records.append([line])
        else:
            records[-1].append(line)
    kept = (record for record in records if _rank(record[0]) >= least)
    return [
        line
        for record in kept
        if all(word in "\n".join(record).casefold() for word in wanted)
        for line in record
    ]


def _rank(line: str) -> int:
    level = LEVEL.match(line)
    return RANKS[level[1]] if level else 0
