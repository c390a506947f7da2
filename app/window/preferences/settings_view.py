"""The settings page: searchable sections of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QScrollArea, QVBoxLayout, QWidget

from app.core.settings import SECTIONS, Settings, SettingsStore, ShownSetting, shown_settings
from app.core.translation import tr
from app.widgets.buttons import IconButton, back_button, button
from app.widgets.controls import page_scroll
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.text import PlainLabel, label
from app.window.preferences.editors import make_editor

EDITOR_WIDTH = 150
"""Minimum width in pixels of an editor next to its title."""


class SettingRow(QWidget):
    """Row for one setting: title, help, editor, reset button and notes."""

    changed = Signal(str, object)  # name, value

    def __init__(self, name: str, shown: ShownSetting, default: object) -> None:
        super().__init__()
        self.name, self.shown, self._default = name, shown, default
        self._in_use: object = None  # the active value, if a change takes effect only later
        self.editor = make_editor(shown, default)
        self.reset = IconButton("reset", tr("Reset to default"), self, size=16)
        self.note = label(_note(shown), "warn")
        self._problem = label("", "warn")
        self._problem.hide()
        self._title, self._help = label(tr(shown.title)), label(tr(shown.help), "muted")
        self._build()
        self.editor.changed.connect(self._on_changed)
        self.reset.clicked.connect(self._on_reset)

    def words(self) -> str:
        """Return this setting's searchable text, case-folded."""
        shown = self.shown
        texts = (shown.title, shown.help, shown.section, shown.words, *shown.choices.values())
        english = (shown.title, shown.words)  # searchable in any language
        return " ".join((*map(tr, texts), *english)).casefold()

    def show_value(self, value: Any, in_use: Any) -> None:
        """Show a value, with a note if `in_use` is still active instead."""
        self._in_use = in_use
        self.editor.show_value(value)
        self._mark(value)

    def show_problem(self, problem: str) -> None:
        """Show why the setting has no effect; "" hides the message."""
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))

    def _mark(self, value: object) -> None:
        self.reset.setVisible(value != self._default)
        is_later = self.shown.takes != "at once" and value != self._in_use
        self.note.setVisible(is_later)

    @Slot(object)
    def _on_changed(self, value: object) -> None:
        self._mark(value)
        self.changed.emit(self.name, value)

    @Slot()
    def _on_reset(self) -> None:
        self.editor.show_value(self._default)
        self.editor.field.setFocus()
        self._on_changed(self._default)

    def _build(self) -> None:
        title = tr(self.shown.title)
        self._title.setBuddy(self.editor.field)
        self.editor.field.setAccessibleName(title)
        self.editor.field.setAccessibleDescription(tr(self.shown.help))
        self.reset.setAccessibleName(tr("Reset to default: {title}").format(title=title))
        for text in (self._title, self._help, self.note, self._problem):
            text.setWordWrap(True)
        keep = self.reset.sizePolicy()
        keep.setRetainSizeWhenHidden(True)
        self.reset.setSizePolicy(keep)
        texts = QVBoxLayout()
        texts.setSpacing(2)
        for text in (self._title, self._help, self.note, self._problem):
            texts.addWidget(text)
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addLayout(texts, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 6, 0, 6)
        layout.setSpacing(6)
        layout.addLayout(head)
        side = Qt.AlignmentFlag.AlignTop
        if self.editor.is_wide:
            layout.addWidget(self.editor)
        else:
            scaled(self.editor, self.editor.setMinimumWidth, EDITOR_WIDTH)
            head.addWidget(self.editor, 0, side)
        head.addWidget(self.reset, 0, side)


def _note(shown: ShownSetting) -> str:
    if shown.takes == "next load":
        return tr("Takes effect when the model is reloaded.")
    return tr("Takes effect when Tandem is restarted.")


WIDTH = 720
"""Maximum width of a row in pixels."""


class SettingsView(QWidget):
    """Page with all settings that are declared as shown."""

    changed = Signal(str, object)  # name, value
    left = Signal()
    shortcuts_requested = Signal()
    log_requested = Signal()
    about_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: dict[str, SettingRow] = {}
        self._headings: dict[str, PlainLabel] = {}
        self._ends: dict[str, QVBoxLayout] = {}  # layouts for panels, by section
        self._panels: list[tuple[str, QWidget, str]] = []  # section, panel, search words
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search settings"))
        self.search.setAccessibleName(tr("Search settings"))
        self.search.setClearButtonEnabled(True)
        self.search.textChanged.connect(self.filter)
        self._nothing = label(tr("No settings match."), "muted")
        self._nothing.hide()
        self._scroll = self._make_rows()
        self._build()

    def show_settings(self, settings: Settings, in_use: Settings) -> None:
        """Show `settings`; `in_use` has the active values."""
        for name, row in self.rows.items():
            row.show_value(getattr(settings, name), getattr(in_use, name))

    def show_problems(self, problems: Mapping[str, str]) -> None:
        """Show why settings have no effect; `problems` has the reasons by setting name."""
        for name, row in self.rows.items():
            row.show_problem(problems.get(name, ""))

    def add_panel(self, section: str, panel: QWidget, words: str) -> None:
        """Add a panel to a section of `SECTIONS`; `words` are searchable."""
        self._ends[section].addWidget(panel)
        self._panels.append((section, panel, f"{tr(section)} {words}".casefold()))
        self.filter(self.search.text())

    def flush(self) -> None:
        """Report any text that is still being typed."""
        for row in self.rows.values():
            row.editor.flush()

    @Slot(str)
    def filter(self, text: str) -> None:
        """Show the settings that match all words."""
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


class SettingsPage(QObject):
    """Presenter for the settings page, which is created on first use; changes apply immediately.

    Args:
        keep: applies and saves settings.
        show: shows a widget in the centre of the window.
        leave: shows the chat there again.
        problems: returns the reasons why settings have no effect, by setting name.
    """

    shortcuts_requested = Signal()
    log_requested = Signal()
    about_requested = Signal()

    def __init__(
        self,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        show: Callable[[QWidget], None],
        leave: Callable[[], None],
        problems: Callable[[], Mapping[str, str]],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._settings, self._keep = settings, keep
        self._show, self._leave, self._problems = show, leave, problems
        self._in_use = settings.current
        self.view: SettingsView | None = None
        self._panels: list[tuple[str, Callable[[], QWidget], str]] = []

    def add_panel(self, section: str, make: Callable[[], QWidget], words: str) -> None:
        """Add a panel to a section of `SECTIONS`; `make` creates it when the page is created."""
        self._panels.append((section, make, words))
        if self.view is not None:
            self.view.add_panel(section, make(), words)

    @Slot()
    def toggle(self) -> None:
        """Show the page, or leave it."""
        view = self.view or self._make()
        if view.isVisible():
            self._leave()
            return
        self.refresh()
        self._show(view)
        view.search.setFocus()
        view.search.selectAll()

    def refresh(self) -> None:
        """Show the current settings."""
        if self.view is not None:
            self.view.show_settings(self._settings.current, self._in_use)
            self.view.show_problems(self._problems())

    def note_load(self) -> None:
        """Mark settings that take effect on load as active."""
        current = self._settings.current
        names = [name for name, shown in shown_settings().items() if shown.takes == "next load"]
        loaded = {name: getattr(current, name) for name in names}
        self._in_use = replace(self._in_use, **loaded)
        self.refresh()

    def close(self) -> None:
        """Report any typed text."""
        if self.view is not None:
            self.view.flush()

    def _make(self) -> SettingsView:
        view = self.view = SettingsView()
        for section, make, words in self._panels:
            view.add_panel(section, make(), words)
        view.changed.connect(self._on_changed)
        view.left.connect(self._leave)
        view.shortcuts_requested.connect(self.shortcuts_requested)
        view.log_requested.connect(self.log_requested)
        view.about_requested.connect(self.about_requested)
        return view

    @Slot(str, object)
    def _on_changed(self, name: str, value: object) -> None:
        self._keep(replace(self._settings.current, **{name: value}))  # type: ignore[arg-type]
