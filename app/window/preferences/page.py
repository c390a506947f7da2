"""The settings page of a window, made when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

from app.core.settings import Settings, SettingsStore

if TYPE_CHECKING:
    from app.window.preferences.views.settings_view import SettingsView


class SettingsPage(QObject):
    """Page of all settings, shown in the middle of the window; each change is used at once.

    Args:
        keep: uses settings and has them written.
        show: shows a widget in the middle of the window.
        leave: shows the chat there again.
        problems: returns why settings have no effect here, by name.
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
        """Have a section end in what is no setting.

        Args:
            section: one of `SECTIONS`.
            make: makes the panel, once the page is wanted.
            words: what a search may find it by.
        """
        self._panels.append((section, make, words))
        if self.view is not None:
            self.view.add_panel(section, make(), words)

    @Slot()
    def toggle(self) -> None:
        """Show the page, with the settings as they are now, or leave it."""
        view = self.view or self._make()
        if view.isVisible():
            self._leave()
            return
        self.refresh()
        self._show(view)
        view.search.setFocus()
        view.search.selectAll()

    def refresh(self) -> None:
        """Show the settings as they are now, whoever has changed them."""
        if self.view is not None:
            self.view.show_settings(self._settings.current, self._in_use)
            self.view.show_problems(self._problems())

    def note_load(self) -> None:
        """Count a load of a model: settings that wait for one are in use now."""
        self._in_use = _with_loaded(self._in_use, self._settings.current)
        self.refresh()

    def close(self) -> None:
        """Keep what is still being typed."""
        if self.view is not None:
            self.view.flush()

    def _make(self) -> SettingsView:
        # imported here, since the window's first picture does not need it
        from app.window.preferences.views.settings_view import SettingsView

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


def _with_loaded(in_use: Settings, current: Settings) -> Settings:
    """Return what is in use after a load."""
    from app.core.settings import shown_settings

    names = [name for name, shown in shown_settings().items() if shown.takes == "next load"]
    return replace(in_use, **{name: getattr(current, name) for name in names})
