"""The models page, created on first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QMessageBox, QTabWidget, QWidget

import engine
from app.core import paths
from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.devices.split.planning import open_planner
from app.devices.split.session import SplitSession
from app.devices.split.settings import default_settings
from app.models.library.library_session import (
    LibraryEntry,
    LibrarySession,
    files_of,
    last_use,
    move_to_trash,
    question_of,
)
from app.models.library.library_view import DetailsDialog, LibraryView
from app.remote.client.address import is_remote
from app.widgets.buttons import back_button
from app.widgets.text import plain_tip, reveal

if TYPE_CHECKING:
    from app.models.downloads.page import DownloadsPart
    from app.models.library.library_session import Situation
    from app.models.library.scan import Place
    from engine import ModelLoaded


class LibraryPresenter(QObject):
    """Connects a `LibrarySession` to its page; `keep` saves settings."""

    noticed = Signal(object)  # Notice
    open_requested = Signal(str)

    def __init__(
        self,
        session: LibrarySession,
        view: LibraryView,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._view = session, view
        self._settings, self._keep = settings, keep
        self._entries: dict[Path, LibraryEntry] = {}
        session.listed.connect(self._on_listed)
        session.described.connect(self._on_described)
        session.finished.connect(lambda: view.set_status(is_busy=False))
        view.open_requested.connect(self.open_requested)
        view.refresh_requested.connect(self.refresh)
        view.folder_requested.connect(self._add_folder)
        view.pin_requested.connect(self._pin)
        view.reveal_requested.connect(reveal)
        view.remove_requested.connect(self._remove)
        view.details_requested.connect(self._show_details)
        self._details = LatestJob("tandem-details", self)
        self._details.done.connect(lambda inspection: DetailsDialog(inspection, view).show())
        self._trash = LatestJob("tandem-trash", self)
        self._trash.done.connect(self._on_removed)
        self._details.failed.connect(lambda error: self.noticed.emit(Notice.of(error)))

    def close(self) -> None:
        """Wait for all threads."""
        self._details.close()
        self._trash.close()

    @Slot()
    def refresh(self) -> None:
        """Search for models again."""
        self._session.refresh()
        self._view.set_status(is_busy=True)

    @Slot(object)
    def _on_listed(self, entries: list[LibraryEntry]) -> None:
        self._entries = {entry.found.path: entry for entry in entries}
        self._show()
        self._view.set_status(is_busy=True)

    @Slot(object)
    def _on_described(self, entry: LibraryEntry) -> None:
        self._entries[entry.found.path] = entry
        self._view.set_entry(entry)

    @Slot()
    def _add_folder(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._view, tr("Folder with models"))
        current = self._settings.current
        if folder and folder not in current.model_folders:
            self._keep(replace(current, model_folders=(*current.model_folders, folder)))
        if folder:
            self.refresh()

    @Slot(str)
    def _pin(self, path: str) -> None:
        current = self._settings.current
        others = tuple(pinned for pinned in current.pinned_models if pinned != path)
        is_new = len(others) == len(current.pinned_models)
        self._keep(replace(current, pinned_models=(*others, path) if is_new else others))
        self._show()

    @Slot(str)
    def _show_details(self, path: str) -> None:
        self._details.run(lambda: engine.inspect_model(path))

    @Slot(str)
    def _remove(self, path: str) -> None:
        found = self._entries[Path(path)].found
        files = files_of(found, [entry.found for entry in self._entries.values()])
        question = QMessageBox.question(
            self._view, tr("Move to trash"), plain_tip(question_of(found, files))
        )
        if question is QMessageBox.StandardButton.Yes:
            self._trash.run(lambda: move_to_trash(files))

    @Slot(object)
    def _on_removed(self, kept: list[Path]) -> None:
        if kept:
            text = tr("{name} could not be moved to the trash.").format(name=kept[0].name)
            hint = tr("Its folder may be read-only, or its disk may have no trash.")
            self.noticed.emit(Notice(text, hint, "error"))
        self.refresh()

    def _show(self) -> None:
        current = self._settings.current
        uses = {str(path): last_use(current, str(path)) for path in self._entries}
        self._view.set_entries(list(self._entries.values()), current.pinned_models, uses)


class LibraryPage(QObject):
    """Page with all models, shown in the middle of the window.

    Args:
        keep: saves settings.
        show: shows a widget in the window.
        leave: returns to the chat.

    Attributes:
        tabs: the page's tabs; None until the page is first shown.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(str)  # path of a model
    eject_requested = Signal()
    download_requested = Signal()

    def __init__(
        self,
        split: SplitSession,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        show: Callable[[QWidget], None],
        leave: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._split, self._settings, self._keep = split, settings, keep
        self._show, self._leave = show, leave
        self.session: LibrarySession | None = None
        self.view: LibraryView | None = None
        self.tabs: QTabWidget | None = None
        self._presenter: LibraryPresenter | None = None
        self._parts: list[DownloadsPart] = []
        self._loaded = self._loading = ""

    def add(self, part: DownloadsPart) -> None:
        """Add a tab; call this before the first `toggle`."""
        self._parts.append(part)
        part.noticed.connect(self.noticed)
        part.open_requested.connect(self._open)
        part.arrived.connect(self._refresh)
        part.left.connect(self._leave)

    @Slot()
    def toggle(self) -> None:
        """Show the page and refresh it, or leave it."""
        tabs = self.tabs or self._make()
        if tabs.isVisible():
            self._leave()
            return
        self._show(tabs)
        self._enter()
        self._refresh()

    def show_part(self, part: DownloadsPart) -> None:
        """Show the page with `part`'s tab in front."""
        tabs = self.tabs or self._make()
        if not tabs.isVisible():
            self.toggle()
        tabs.setCurrentIndex(1 + self._parts.index(part))
        self._enter()

    def show_running(self, loaded: str, loading: str) -> None:
        """Mark the model that is loaded and the one being loaded, given their paths or ""."""
        self._loaded, self._loading = loaded, loading
        if self.view is not None:
            self._mark_running(self.view)

    def _mark_running(self, view: LibraryView) -> None:
        from app.models.library.library_session import RunningModel

        view.set_running(RunningModel.at(self._loaded, self._loading))

    def note_speed(self, loaded: ModelLoaded | None, tokens_per_s: float) -> None:
        """Save the loaded model's speed without draft tokens."""
        if loaded is not None:
            self._keep(self._settings.current.with_speed(loaded.info.path, tokens_per_s))

    def close(self) -> None:
        """Wait for all threads."""
        for part in self._parts:
            part.close()
        if self.session is not None and self._presenter is not None:
            self.session.close()
            self._presenter.close()

    @Slot()
    def _refresh(self) -> None:
        if self._presenter is not None and self.view is not None:
            self.view.show_folders(self._own_folders())
            self._presenter.refresh()

    @Slot()
    def _enter(self) -> None:
        assert self.tabs is not None
        assert self.view is not None
        number = self.tabs.currentIndex()
        if number:
            self._parts[number - 1].enter()
        else:
            self.view.search.setFocus()

    def _make(self) -> QTabWidget:
        # imported here because the window's first frame does not need it
        from app.models.library.library_session import LibrarySession
        from app.models.library.library_view import LibraryView

        self.session = LibrarySession(self._places, self.situation, self)
        self.view = LibraryView()
        self._mark_running(self.view)
        self._presenter = LibraryPresenter(
            self.session, self.view, self._settings, self._keep, self
        )
        self._presenter.noticed.connect(self.noticed)
        self._presenter.open_requested.connect(self._open_listed)
        self.view.left.connect(self._leave)
        self.view.eject_requested.connect(self.eject_requested)
        self.view.download_requested.connect(self.download_requested)
        tabs = self.tabs = QTabWidget()
        back = back_button()
        back.clicked.connect(self._leave)
        tabs.setCornerWidget(back)
        tabs.tabBar().setAccessibleName(tr("Parts of the models page"))
        tabs.addTab(self.view, tr("On this machine"))
        for part in self._parts:
            tabs.addTab(part.widget(), part.title)
        tabs.currentChanged.connect(self._enter)
        return tabs

    def situation(self) -> Situation:
        """Return the current devices, for predictions on another thread."""
        from app.models.library.library_session import Situation

        split = self._split
        make = split.forecasters()
        forecaster = None if make is None else cache(make)  # one for all models
        return Situation(
            default_settings(split.devices), split.free_bytes(), forecaster, open_planner
        )

    def _places(self) -> list[Place]:
        from app.models.library.scan import known_places, opened_models

        demo = paths.demo_model()
        recent = (path for path in self._settings.current.recent_models if path != str(demo))
        opened = opened_models(path for path in recent if not is_remote(path))
        return [*known_places(self._own_folders()), *opened]

    def _own_folders(self) -> list[str]:
        current = self._settings.current
        return [*current.model_folders, current.download_folder or str(paths.models_dir())]

    @Slot(str)
    def _open_listed(self, path: str) -> None:
        if self.view is not None and self.view.is_loaded(path):
            self._leave()
        else:
            self._open(path)

    @Slot(str)
    def _open(self, path: str) -> None:
        self._leave()
        self.opened.emit(path)
