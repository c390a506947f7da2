"""The session of the models page: looks for models in the background, and watches their folders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QFileSystemWatcher, QObject, QTimer, Signal, Slot

from app.models.library.entries import LibraryEntry, Situation, prospect_of, read_entry
from app.models.library.places import Place
from app.models.library.scan import FoundModel, scan
from engine import ModelInfo

log = logging.getLogger(__name__)

SETTLE_MS = 1500
"""Milliseconds without a change of a folder until it is read again: files arrive in pieces."""

JOIN_S = 5.0
MOST_WATCHED = 200
"""Number of folders that are watched; systems have few watches for all programs together."""

Known = dict[tuple[Path, int, float], LibraryEntry]


class LibrarySession(QObject):
    """The models on this machine; nothing is read before `refresh`.

    Args:
        places: returns the folders to look into.
        situation: returns the devices to predict for.
    """

    listed = Signal(object)  # list of LibraryEntry: all models, with what was known of them before
    described = Signal(object)  # LibraryEntry of which more is known now
    finished = Signal()  # all that can be known is known

    _passed_on = Signal(int, str, object)

    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        situation: Callable[[], Situation],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._places, self._situation = places, situation
        self._known: Known = {}
        self._number = 0
        self._is_busy = False
        self._threads: list[threading.Thread] = []  # the last one, and those that end before it
        self._watcher = QFileSystemWatcher(self)
        self._watcher.directoryChanged.connect(self._on_changed)
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self.refresh)
        self._passed_on.connect(self._on_passed)

    @property
    def is_busy(self) -> bool:
        """Whether models are being looked for or described."""
        return self._is_busy

    @Slot()
    def refresh(self) -> None:
        """Look for models again; what is known of unchanged files stays known."""
        self._number += 1  # a search under way ends at its next model; nobody waits for it
        number, places, situation = self._number, list(self._places()), self._situation()

        def work() -> None:
            self._look(number, places, situation)

        thread = threading.Thread(target=work, name="tandem-library", daemon=True)
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        self._is_busy = True
        thread.start()

    def close(self) -> None:
        """End the search and watch nothing any more."""
        self._settle.stop()
        self._number += 1
        for thread in self._threads:
            thread.join(JOIN_S)
        if watched := self._watcher.directories():
            self._watcher.removePaths(watched)

    # on the thread

    def _look(self, number: int, places: list[Place], situation: Situation) -> None:
        """Find models, then read the header of each, then predict how each would run."""

        def is_over() -> bool:
            return number != self._number

        entries = [
            self._known.get(_key(found), LibraryEntry(found)) for found in scan(places, is_over)
        ]
        if is_over():
            return
        self._passed_on.emit(number, "listed", entries)
        infos: list[tuple[LibraryEntry, ModelInfo]] = []
        for entry in entries:
            if is_over():
                return
            described = entry
            if entry.info is None and not entry.problem:
                described = read_entry(entry.found)
                self._passed_on.emit(number, "described", described)
            if described.info is not None and not described.problem:
                infos.append((described, described.info))
        if situation.forecaster is None:  # the devices are not known yet
            infos.clear()
        for entry, info in sorted(infos, key=lambda pair: pair[0].found.n_bytes):
            if is_over():
                return
            judged = replace(entry, prospect=prospect_of(info, situation), is_judged=True)
            if judged != entry:
                self._passed_on.emit(number, "described", judged)
        self._passed_on.emit(number, "finished", None)

    # on the GUI thread

    @Slot(int, str, object)
    def _on_passed(self, number: int, what: str, result: object) -> None:
        if number != self._number:
            return
        if what == "finished":
            self._is_busy = False
            self.finished.emit()
        elif isinstance(result, LibraryEntry):
            self._known[_key(result.found)] = result
            self.described.emit(result)
        elif isinstance(result, list):
            self._watch([entry.found for entry in result])
            self.listed.emit(result)

    def _watch(self, found: Sequence[FoundModel]) -> None:
        """Watch the folders of the models, and the places themselves."""
        places = self._places()
        folders = [str(place.path) for place in places if place.layout != "file"]
        folders += [str(model.path.parent) for model in found]
        wanted = set(list(dict.fromkeys(folders))[:MOST_WATCHED])
        now = set(self._watcher.directories())
        if now - wanted:
            self._watcher.removePaths(sorted(now - wanted))
        if wanted - now:
            self._watcher.addPaths(sorted(wanted - now))

    @Slot(str)
    def _on_changed(self, folder: str) -> None:
        log.info("models may have changed in %s", folder)
        self._settle.start()


def _key(found: FoundModel) -> tuple[Path, int, float]:
    """Return what tells a file and its contents from others."""
    return found.path, found.n_bytes, found.modified
