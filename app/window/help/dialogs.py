"""The help dialogs, created on first use; threads read their contents."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QListWidget,
    QScrollArea,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from app.core.background import LatestJob
from app.core.process.crash import read_log
from app.core.settings import SettingsStore
from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page, search_field
from app.widgets.shortcuts import SHORTCUTS, shown_keys
from app.widgets.text import PlainLabel, label, list_item, set_tip
from app.widgets.theme import px
from app.window.help.licences import Component
from engine import DeviceInfo, printable


class AboutDialog(PageDialog):
    """Dialog that lists versions, and components with their licences."""

    licence_requested = Signal(object)  # Component
    check_requested = Signal()  # for a newer release
    news_requested = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("About Tandem"), parent, (860, 620))
        self._components: tuple[Component, ...] = ()
        self.versions = label(tr("Reading…"))
        self.versions.setWordWrap(True)
        self.head.addWidget(self.versions, 1)
        self.head.addLayout(self._make_update(), 1)
        self.search = search_field(tr("Search components and licences"))
        self.list = QListWidget()
        self.list.setProperty("role", "field")
        self.list.setAccessibleName(tr("Components"))
        self.text = plain_page(tr("Licence"))
        side = QWidget()
        column = QVBoxLayout(side)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.search)
        column.addWidget(self.list, 1)
        both = QSplitter()
        both.addWidget(side)
        both.addWidget(self.text)
        both.setSizes([px(260), px(560)])
        self.set_content(both)
        self.search.textChanged.connect(self._filter)
        self.list.currentRowChanged.connect(self._on_row)

    def show_facts(
        self, versions: Sequence[tuple[str, str]], components: Sequence[Component]
    ) -> None:
        """Show the versions and components."""
        self.versions.setText("\n".join(f"{name} {version}" for name, version in versions))
        self._components = tuple(components)
        self.list.clear()
        for component in components:
            text = f"{component.name} {component.version}".strip()
            self.list.addItem(list_item(text, component.licence))
        if components:
            self.list.setCurrentRow(0)
        self._filter(self.search.text())

    def show_licence(self, component: Component, text: str) -> None:
        """Show a component's licence, if the component is still selected."""
        row = self.list.currentRow()
        if 0 <= row < len(self._components) and self._components[row] == component:
            title = f"{component.name}: {component.licence}"
            self.text.setPlainText(f"{title}\n\n{text or tr('No licence text is included.')}")

    def show_update(self, text: str, has_news: bool) -> None:
        """Show the result of an update check, and whether there are release notes."""
        self.update_line.setText(text)
        self.update_line.setVisible(bool(text))
        self.news.setVisible(has_news)

    def _make_update(self) -> QVBoxLayout:
        self.update_line = label(role="muted")
        self.update_line.setWordWrap(True)
        self.update_line.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.update_line.hide()
        self.check = button(tr("Check for updates"))
        self.check.clicked.connect(self.check_requested)
        self.news = button(tr("What's new"), "primary")
        self.news.clicked.connect(self.news_requested)
        self.news.hide()
        for made in (self.check, self.news):
            made.setAutoDefault(False)
        buttons = QHBoxLayout()
        buttons.addStretch()
        buttons.addWidget(self.news)
        buttons.addWidget(self.check)
        column = QVBoxLayout()
        column.addLayout(buttons)
        column.addWidget(self.update_line)
        column.addStretch()
        return column

    @Slot(str)
    def _filter(self, text: str) -> None:
        wanted = text.casefold().split()
        for row, component in enumerate(self._components):
            known = f"{component.name} {component.version} {component.licence}".casefold()
            self.list.item(row).setHidden(not all(word in known for word in wanted))

    @Slot(int)
    def _on_row(self, row: int) -> None:
        if 0 <= row < len(self._components):
            self.licence_requested.emit(self._components[row])


LEVELS: Final = ("INFO", "WARNING", "ERROR")
LEVEL = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
RANKS: Final = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2, "CRITICAL": 2}
"""Severity by level; a line without a level, as in a traceback, continues the previous one."""


class LogDialog(PageDialog):
    """Dialog with the last lines of the log."""

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
               "names or tokens"),
        )  # fmt: skip
        self.copy.clicked.connect(self.copy_requested)
        self._status = label(role="muted")
        self.foot.insertWidget(0, self.copy)
        self.foot.insertWidget(1, self._status)
        self.level.currentIndexChanged.connect(self._show)
        self.search.textChanged.connect(self._show)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show the lines that match the filters, newest last."""
        self._lines = tuple(lines)
        self._show()

    def say(self, text: str) -> None:
        """Show a status."""
        self._status.setText(text)

    @Slot()
    def _show(self) -> None:
        found = filtered(self._lines, self.level.currentIndex(), self.search.text())
        self.text.setPlainText(printable("\n".join(found)) or tr("No entries."))
        bar = self.text.verticalScrollBar()
        bar.setValue(bar.maximum())


def filtered(lines: Sequence[str], least: int, words: str) -> list[str]:
    """Return records (with tracebacks) of at least level `LEVELS[least]` that contain all words."""
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


class ShortcutsDialog(PageDialog):
    """Dialog with all shortcuts, grouped by context; `rows` has their text and key labels."""

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
            text, keys = label(tr(shortcut.text)), label(" · ".join(_keys_of(name)), "muted")
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
        """Show the shortcuts that match all words."""
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


def _keys_of(name: str) -> list[str]:
    keys = shown_keys(name)  # "1" to "9" are shown as a range
    return keys if len(keys) <= 4 else [f"{keys[0]} – {keys[-1]}"]


class HelpDialogs(QObject):
    """The dialogs for shortcuts, versions and the log.

    Args:
        over: parent window.
        devices: returns the window's devices.
        private: returns texts to remove from reports, for example chat titles.
    """

    check_requested = Signal()  # for a newer release
    news_requested = Signal()
    about_made = Signal()

    def __init__(
        self,
        over: QWidget,
        log_file: Path,
        settings: SettingsStore,
        devices: Callable[[], Sequence[DeviceInfo]],
        private: Callable[[], Collection[str]],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._over, self._log_file, self._settings = over, log_file, settings
        self._devices, self._private = devices, private
        self.shortcuts: ShortcutsDialog | None = None
        self.about: AboutDialog | None = None
        self.log: LogDialog | None = None
        self._facts_job, self._licence_job, self._log_job, self._report_job = (
            LatestJob(f"tandem-{name}", self) for name in ("facts", "licence", "log", "report")
        )
        self._report_job.done.connect(self._on_report)

    @Slot()
    def show_shortcuts(self) -> None:
        if self.shortcuts is None:
            self.shortcuts = ShortcutsDialog(self._over)
        self.shortcuts.appear()
        self.shortcuts.search.setFocus()

    @Slot()
    def show_about(self) -> None:
        if self.about is None:
            about = self.about = AboutDialog(self._over)
            about.licence_requested.connect(self._read_licence)
            about.check_requested.connect(self.check_requested)
            about.news_requested.connect(self.news_requested)
            self._facts_job.done.connect(lambda facts: about.show_facts(*facts))
            self._licence_job.done.connect(lambda found: about.show_licence(*found))
            self.about_made.emit()
        self.about.appear()
        devices = self._devices()
        self._facts_job.run(lambda: _read_facts(devices))

    @Slot()
    def show_log(self) -> None:
        if self.log is None:
            self.log = LogDialog(self._over)
            self.log.refresh_requested.connect(self._read_log)
            self.log.copy_requested.connect(self._copy_report)
            self._log_job.done.connect(self.log.show_lines)
        self.log.appear()
        self.log.search.setFocus()
        self._read_log()

    @Slot(str, bool)
    def show_update(self, text: str, has_news: bool) -> None:
        """Show the result of an update check in the About dialog, if that has been created."""
        if self.about is not None:
            self.about.show_update(text, has_news)

    def close(self) -> None:
        """Stop all threads and close the dialogs."""
        for job in (self._facts_job, self._licence_job, self._log_job, self._report_job):
            job.close()
        for dialog in (self.shortcuts, self.about, self.log):
            if dialog is not None:
                dialog.close()

    @Slot(object)
    def _read_licence(self, component: Component) -> None:
        from app.window.help.licences import licence_text

        self._licence_job.run(lambda: (component, licence_text(component)))

    @Slot()
    def _read_log(self) -> None:
        self._log_job.run(lambda: read_log(self._log_file))

    @Slot()
    def _copy_report(self) -> None:
        from app.window.help.diagnostics import report

        devices, settings = self._devices(), self._settings.current
        private = (*self._private(), settings.system_prompt)
        self._report_job.run(
            lambda: report(
                _read_facts(devices)[0], devices, settings, read_log(self._log_file), private
            )
        )

    @Slot(object)
    def _on_report(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        if self.log is not None:
            self.log.say(tr("Copied. Review it before sharing it."))


def _read_facts(devices: Sequence[DeviceInfo]) -> tuple[list[tuple[str, str]], list[Component]]:
    from app.window.help.diagnostics import all_components, versions

    return versions(devices), all_components()
