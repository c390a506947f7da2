"""Removal of the temporary files that killed processes have left in folders of the app."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QObject, Slot

from app.core.background import LatestJob
from engine import sweep_temporaries


class Sweeper(QObject):
    """A thread that sweeps folders whenever it is asked to: a chat's cache may have gigabytes."""

    def __init__(self, folders: Sequence[Path], parent: QObject) -> None:
        super().__init__(parent)
        self._folders = tuple(folders)
        self._job = LatestJob("tandem-sweep", self)

    @Slot()
    @Slot(object)
    def sweep(self, _: object = None) -> None:
        """Delete what dead processes have left; return at once."""
        self._job.run(self._sweep_all)

    def close(self) -> None:
        """Wait until nothing is swept any more."""
        self._job.close()

    def _sweep_all(self) -> None:
        for folder in self._folders:
            sweep_temporaries(folder)
