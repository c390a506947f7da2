"""Connects the models page with its session, the settings and the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QMessageBox

import engine
from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.models.library.entries import LibraryEntry
from app.models.library.last_use import last_use
from app.models.library.removal import files_of, move_to_trash, question_of
from app.models.library.session import LibrarySession
from app.models.library.views.details_dialog import DetailsDialog
from app.models.library.views.library_view import LibraryView
from app.widgets.files import reveal
from app.widgets.text import plain_tip


class LibraryPresenter(QObject):
    """Connection of one `LibrarySession` with its page.

    Args:
        keep: stores settings and has them written.
    """

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
        """End all work on threads."""
        self._details.close()
        self._trash.close()

    @Slot()
    def refresh(self) -> None:
        """Look for models again."""
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
        """Ask for a folder to look into as well."""
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
        """Show the header of a file; reading a whole one takes a moment."""
        self._details.run(lambda: engine.inspect_model(path))

    @Slot(str)
    def _remove(self, path: str) -> None:
        """Move the files of a model to the trash, after a question."""
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
        """Show all models with what is known of them."""
        current = self._settings.current
        uses = {str(path): last_use(current, str(path)) for path in self._entries}
        self._view.set_entries(list(self._entries.values()), current.pinned_models, uses)
