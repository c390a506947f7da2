"""Opens the dialogs of help, each made when it is first wanted; a thread reads what they show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QWidget

from app.core.background import LatestJob
from app.core.process.log_file import read_log
from app.core.settings import SettingsStore
from app.core.translation import tr
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.window.help.licences import Component
    from app.window.help.views.about_dialog import AboutDialog
    from app.window.help.views.log_dialog import LogDialog
    from app.window.help.views.shortcuts_dialog import ShortcutsDialog


class HelpDialogs(QObject):
    """The dialogs for shortcuts, versions and the log.

    Args:
        over: the window they belong to.
        log_file: file of the log.
        devices: returns the devices that are shown.
        private: returns texts that no report may have, such as titles of chats.
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
        self._facts_job.done.connect(self._on_facts)
        self._licence_job.done.connect(self._on_licence)
        self._log_job.done.connect(self._on_log)
        self._report_job.done.connect(self._on_report)

    @Slot()
    def show_shortcuts(self) -> None:
        if self.shortcuts is None:
            from app.window.help.views.shortcuts_dialog import ShortcutsDialog

            self.shortcuts = ShortcutsDialog(self._over)
        self.shortcuts.appear()
        self.shortcuts.search.setFocus()

    @Slot()
    def show_about(self) -> None:
        if self.about is None:
            from app.window.help.views.about_dialog import AboutDialog

            self.about = AboutDialog(self._over)
            self.about.licence_requested.connect(self._read_licence)
            self.about.check_requested.connect(self.check_requested)
            self.about.news_requested.connect(self.news_requested)
            self.about_made.emit()
        self.about.appear()
        devices = self._devices()
        self._facts_job.run(lambda: _read_facts(devices))

    @Slot()
    def show_log(self) -> None:
        if self.log is None:
            from app.window.help.views.log_dialog import LogDialog

            self.log = LogDialog(self._over)
            self.log.refresh_requested.connect(self._read_log)
            self.log.copy_requested.connect(self._copy_report)
        self.log.appear()
        self.log.search.setFocus()
        self._read_log()

    @Slot(str, bool)
    def show_update(self, text: str, has_news: bool) -> None:
        """Show what is known of newer releases, if there is a page for it."""
        if self.about is not None:
            self.about.show_update(text, has_news)

    def close(self) -> None:
        """End all work on threads, and close the dialogs."""
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
    def _on_facts(self, facts: tuple[Sequence[tuple[str, str]], Sequence[Component]]) -> None:
        if self.about is not None:
            self.about.show_facts(*facts)

    @Slot(object)
    def _on_licence(self, found: tuple[Component, str]) -> None:
        if self.about is not None:
            self.about.show_licence(*found)

    @Slot(object)
    def _on_log(self, lines: Sequence[str]) -> None:
        if self.log is not None:
            self.log.show_lines(lines)

    @Slot(object)
    def _on_report(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        if self.log is not None:
            self.log.say(tr("Copied. Read it before you send it to anybody."))


def _read_facts(
    devices: Sequence[DeviceInfo],
) -> tuple[list[tuple[str, str]], list[Component]]:
    """Return versions and components; work for a thread."""
    from app.window.help.facts import versions
    from app.window.help.parts import all_components

    return versions(devices), all_components()
