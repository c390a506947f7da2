"""The settings page: sections of settings, found by a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QScrollArea, QVBoxLayout, QWidget

from app.core.settings import SECTIONS, Settings, shown_settings
from app.core.translation import tr
from app.widgets.buttons import back_button, button
from app.widgets.controls import page_scroll
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.sizes import scaled
from app.widgets.text import PlainLabel, label
from app.window.preferences.views.setting_row import SettingRow

WIDTH = 720
"""Largest width of a row, in pixels."""


class SettingsView(QWidget):
    """Page of all settings that are declared as shown."""

    changed = Signal(str, object)  # name, value
    left = Signal()
    shortcuts_requested = Signal()
    log_requested = Signal()
    about_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: dict[str, SettingRow] = {}
        self._headings: dict[str, PlainLabel] = {}
        self._ends: dict[str, QVBoxLayout] = {}  # places for panels, by section
        self._panels: list[tuple[str, QWidget, str]] = []  # section, panel, words
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search settings"))
        self.search.setAccessibleName(tr("Search settings"))
        self.search.setClearButtonEnabled(True)
        self.search.textChanged.connect(self.filter)
        self._nothing = label(tr("No setting has these words."), "muted")
        self._nothing.hide()
        self._scroll = self._make_rows()
        self._build()

    def show_settings(self, settings: Settings, in_use: Settings) -> None:
        """Show these values; `in_use` are those that the program has started with."""
        for name, row in self.rows.items():
            row.show_value(getattr(settings, name), getattr(in_use, name))

    def show_problems(self, problems: Mapping[str, str]) -> None:
        """Say why settings have no effect here, by name; all others have one."""
        for name, row in self.rows.items():
            row.show_problem(problems.get(name, ""))

    def add_panel(self, section: str, panel: QWidget, words: str) -> None:
        """Add what is no setting to a section.

        Args:
            section: one of `SECTIONS`.
            words: what a search may find it by.
        """
        self._ends[section].addWidget(panel)
        self._panels.append((section, panel, f"{tr(section)} {words}".casefold()))
        self.filter(self.search.text())

    def flush(self) -> None:
        """Report texts that are still being typed."""
        for row in self.rows.values():
            row.editor.flush()

    @Slot(str)
    def filter(self, text: str) -> None:
        """Show the settings that have all words of a text, in any order."""
        wanted = text.casefold().split()
        found: set[str] = set()
        for row in self.rows.values():
            known = row.words()
            is_found = all(word in known for word in wanted)
            row.setVisible(is_found)
            if is_found:
                found.add(row.shown.section)
        for section, panel, known in self._panels:
            is_found = all(word in known for word in wanted)
            panel.setVisible(is_found)
            if is_found:
                found.add(section)
        for section, heading in self._headings.items():
            heading.setVisible(section in found)
        self._nothing.setVisible(not found)

    def _make_rows(self) -> QScrollArea:
        defaults = {spec.name: spec.default for spec in fields(Settings)}
        content = QWidget()
        scaled(content, content.setMaximumWidth, WIDTH)
        layout = QVBoxLayout(content)
        layout.setContentsMargins(0, 0, 12, 0)
        layout.setSpacing(4)
        layout.addWidget(self._nothing)
        by_section: Mapping[str, list[str]] = {section: [] for section in SECTIONS}
        for name, shown in shown_settings().items():
            by_section[shown.section].append(name)
        for section, names in by_section.items():
            heading = self._headings[section] = label(tr(section), "heading")
            heading.setContentsMargins(0, 12, 0, 0)
            layout.addWidget(heading)
            if not names:
                heading.hide()
            for name in names:
                row = self.rows[name] = SettingRow(name, shown_settings()[name], defaults[name])
                row.changed.connect(self.changed)
                layout.addWidget(row)
            end = self._ends[section] = QVBoxLayout()
            layout.addLayout(end)
        layout.addStretch()
        return page_scroll(content, layout, tr("Settings"))

    def _build(self) -> None:
        back = back_button()
        back.clicked.connect(self.left)
        top = QWidget()
        scaled(top, top.setMaximumWidth, WIDTH)
        head = QHBoxLayout(top)
        head.setContentsMargins(0, 0, 12, 0)
        head.setSpacing(8)
        head.addWidget(label(tr("Settings"), "title"))
        head.addWidget(self.search, 1)
        head.addWidget(back)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(20, 16, 8, 8)
        layout.setSpacing(8)
        layout.addWidget(top)
        layout.addWidget(self._scroll, 1)
        layout.addLayout(self._make_foot())

    def _make_foot(self) -> QHBoxLayout:
        """Make the row of what is no setting: dialogs of help."""
        foot = QHBoxLayout()
        for text, signal in (
            (with_keys(tr("Shortcuts"), "shortcuts"), self.shortcuts_requested),
            (tr("Log"), self.log_requested), (tr("About Tandem"), self.about_requested),
        ):  # fmt: skip
            made = button(text, "quiet")
            made.clicked.connect(signal)
            foot.addWidget(made)
        foot.addStretch()
        return foot

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not is_pressed("leave-page", event):
            super().keyPressEvent(event)
        elif self.search.text():
            self.search.clear()
        else:
            self.left.emit()
