"""The question for the newest release: when it is asked, and what is known from it. No widgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core.background import LatestJob
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from engine import EngineError, package_version

if TYPE_CHECKING:
    from app.setup.updates.release import Release

DAY_S: Final = 24 * 3600
FIRST_MS: Final = 10_000
"""Milliseconds from the start, or from the consent, until the first look."""

NEXT_MS: Final = 3600 * 1000
"""Milliseconds between looks at the clock; a request comes once a day."""

GIVE_UP_MS: Final = 15_000
"""Milliseconds after which a request counts as failed, whatever its thread waits for."""


class UpdateSession(QObject):
    """The question for the newest release: asked once a day after consent, else only by a click.

    Args:
        keep: uses settings and has them written.
    """

    asking = Signal()
    answered = Signal()
    failed = Signal(object)  # EngineError
    looked = Signal()  # at the clock, after consent

    def __init__(
        self, settings: SettingsStore, keep: Callable[[Settings], None], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._settings, self._keep = settings, keep
        self._is_closed = False
        self._job: LatestJob | None = None
        self._timer = QTimer(self)
        self._timer.timeout.connect(self._look)
        self._limit = QTimer(self, singleShot=True, interval=GIVE_UP_MS)
        self._limit.timeout.connect(self._give_up)

    @property
    def version(self) -> str:
        """The version of this Tandem; "" where it runs from a folder."""
        return package_version()

    @property
    def newer(self) -> Release | None:
        """The newest release that is known, if it is newer than this Tandem."""
        kept = self._settings.current.newest_release
        if not kept:
            return None
        from app.setup.updates.release import is_newer, read_release

        try:
            release = read_release(kept)
        except EngineError:
            return None
        return release if is_newer(release.version, self.version) else None

    @property
    def address(self) -> str:
        """The address to ask; "" for none."""
        from app.setup.updates.release import bundled_address

        return self._settings.current.release_address.strip() or bundled_address()

    @Slot()
    def apply(self) -> None:
        """Begin to look once a day, or end it, as the settings say."""
        if self._is_closed or not self._settings.current.checks_releases:
            self._timer.stop()
        elif not self._timer.isActive():
            self._timer.start(FIRST_MS)

    def look_again(self, in_ms: int) -> None:
        """Look at the clock again sooner than planned."""
        if self._timer.isActive():
            self._timer.start(in_ms)

    @Slot()
    def check(self) -> None:
        """Ask now."""
        address = self.address
        if not self.version:
            self.failed.emit(
                EngineError(tr("This Tandem runs from its source tree and has no version."))
            )
        elif not address:
            self.failed.emit(
                EngineError(
                    tr("This Tandem has no address to ask for releases."),
                    tr("Enter one in the settings."),
                )
            )
        elif self._job is None:
            self._keep(replace(self._settings.current, releases_checked=int(time.time())))
            self._ask(address)

    def close(self) -> None:
        """Ask no more, and wait a moment for what runs."""
        self._is_closed = True
        self._timer.stop()
        self._end(1.0)

    def _ask(self, address: str) -> None:
        def work() -> Release:
            from app.setup.updates.source import fetch_release  # late: it takes a moment

            return fetch_release(address)

        self._job = LatestJob("tandem-releases", self)
        self._job.done.connect(self._on_found)
        self._job.failed.connect(self._on_failed)
        self._limit.start()
        self.asking.emit()
        self._job.run(work)

    @Slot()
    def _look(self) -> None:
        self._timer.start(NEXT_MS)
        since = time.time() - self._settings.current.releases_checked
        if not 0 <= since < DAY_S and self.address and self.version:
            self.check()
        self.looked.emit()

    @Slot(object)
    def _on_found(self, release: Release) -> None:
        self._end()
        self._keep(replace(self._settings.current, newest_release=release.kept()))
        self.answered.emit()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._end()
        self.failed.emit(error)

    @Slot()
    def _give_up(self) -> None:
        self._end()
        self.failed.emit(EngineError(tr("The server does not answer."), tr("Try it later.")))

    def _end(self, wait_s: float = 0.0) -> None:
        """Forget the request; its thread ends by itself."""
        self._limit.stop()
        job, self._job = self._job, None
        if job is not None:
            job.close(wait_s)
