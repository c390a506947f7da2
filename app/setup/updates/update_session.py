"""Release checks: their schedule, the newest release, and its banner and dialog."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from PySide6.QtCore import QObject, QTimer, QUrl, Signal, Slot
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import error_text, tr
from app.setup.updates.release import Release, is_web_page
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page
from app.widgets.text import label
from engine import EngineError, package_version

DAY_S: Final = 24 * 3600
FIRST_MS: Final = 10_000  # milliseconds from start-up or consent to the first check

NEXT_MS: Final = 3600 * 1000
"""Milliseconds between checks of the schedule; requests are sent once a day."""

GIVE_UP_MS: Final = 15_000  # milliseconds after which a request counts as failed


class UpdateSession(QObject):
    """Release checks: daily with consent, otherwise only on request; `keep` saves settings."""

    asking = Signal()
    answered = Signal()
    failed = Signal(object)  # EngineError
    looked = Signal()  # the schedule was checked

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
        """This Tandem's version; "" if it runs from its source tree."""
        return package_version()

    @property
    def newer(self) -> Release | None:
        """The newest known release, if it is newer than this Tandem."""
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
        """The address for release checks, or ""."""
        from app.setup.updates.release import bundled_address

        return self._settings.current.release_address.strip() or bundled_address()

    @Slot()
    def apply(self) -> None:
        """Start or stop daily checks according to the settings."""
        if self._is_closed or not self._settings.current.checks_releases:
            self._timer.stop()
        elif not self._timer.isActive():
            self._timer.start(FIRST_MS)

    def look_again(self, in_ms: int) -> None:
        """Check the schedule again in `in_ms`."""
        if self._timer.isActive():
            self._timer.start(in_ms)

    @Slot()
    def check(self) -> None:
        """Send a request now."""
        address = self.address
        if not self.version:
            text = tr("Tandem runs from its source tree and has no version.")
            self.failed.emit(EngineError(text))
        elif not address:
            text = tr("Tandem has no address for release checks.")
            self.failed.emit(EngineError(text, tr("Enter one in the settings.")))
        elif self._job is None:
            self._keep(replace(self._settings.current, releases_checked=int(time.time())))
            self._ask(address)

    def close(self) -> None:
        """Stop checking and wait briefly for the thread."""
        self._is_closed = True
        self._timer.stop()
        self._end(1.0)

    def _ask(self, address: str) -> None:
        def work() -> Release:
            from app.setup.updates.source import fetch_release  # imported here because it is slow

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
        self.failed.emit(EngineError(tr("The server does not respond."), tr("Try again later.")))

    def _end(self, wait_s: float = 0.0) -> None:
        """Drop the request; its thread may still be running."""
        self._limit.stop()
        job, self._job = self._job, None
        if job is not None:
            job.close(wait_s)


class NewsDialog(PageDialog):
    """Dialog with release notes as plain text."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("New release"), parent, (640, 520))
        self._page = ""
        self.head_line = label()
        self.head_line.setWordWrap(True)
        self.head.addWidget(self.head_line)
        self.text = plain_page(tr("What's new"))
        self.set_content(self.text)
        self.address = label(role="muted")
        self.address.setWordWrap(True)
        self.column.insertWidget(2, self.address)
        self.visit = button(tr("Open the download page"))
        self.visit.clicked.connect(self._open)
        self.foot.insertWidget(0, self.visit)

    def show_release(self, release: Release, own: str) -> None:
        """Show a release and this Tandem's version."""
        line = tr("Tandem {version} is available; this is {own}. Tandem does not update itself.")
        self.head_line.setText(line.format(version=release.version, own=own))
        self.text.setPlainText(release.news or tr("This release has no release notes."))
        self._page = release.page
        self.address.setText(release.page)

    @Slot()
    def _open(self) -> None:
        if is_web_page(self._page):
            QDesktopServices.openUrl(QUrl(self._page))


LATER_MS: Final = 60_000  # milliseconds before another attempt if the banner is in use


class UpdatePresenter(QObject):
    """Connects the session to banner and dialog; `may_tell` returns whether the banner is free."""

    noticed = Signal(object)  # Notice
    status_changed = Signal(str, bool)  # text; whether there are release notes to show

    def __init__(
        self,
        over: QWidget,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        may_tell: Callable[[], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._over, self._settings, self._keep, self._may_tell = over, settings, keep, may_tell
        self.session = UpdateSession(settings, keep, self)
        self.dialog: NewsDialog | None = None
        self._shown_version = ""
        self.session.asking.connect(lambda: self.status_changed.emit(tr("Checking …"), False))
        self.session.answered.connect(self._on_answered)
        self.session.failed.connect(self._on_failed)
        self.session.looked.connect(self._show_banner)

    @Slot()
    def apply(self) -> None:
        """Start or stop daily checks according to the settings."""
        self.session.apply()

    @Slot()
    def tell(self) -> None:
        """Emit the known status without checking again."""
        newer = self.session.newer
        self.status_changed.emit(_is_out(newer.version) if newer else "", newer is not None)

    @Slot()
    def check(self) -> None:
        """Send a request now."""
        self.session.check()

    @Slot()
    def show_news(self) -> None:
        """Show the release notes and the download page."""
        release = self.session.newer
        if release is None:
            return
        if self.dialog is None:
            self.dialog = NewsDialog(self._over)
        self.dialog.show_release(release, self.session.version)
        self.dialog.appear()
        self._dismiss()

    def problems(self) -> dict[str, str]:
        """Return reasons why settings have no effect, by setting name."""
        from app.setup.updates.release import is_web_page

        current = self._settings.current
        if current.release_address and not is_web_page(current.release_address.strip()):
            return {"release_address": tr("Only addresses starting with https:// are accepted.")}
        if current.checks_releases and not self.session.address:
            return {"checks_releases": tr("Tandem has no default address; enter one below.")}
        return {}

    def close(self) -> None:
        """Stop checking and close the dialog."""
        self.session.close()
        if self.dialog is not None:
            self.dialog.close()

    @Slot()
    def _on_answered(self) -> None:
        if self.session.newer is None:
            self.status_changed.emit(tr("This is the newest release."), False)
            return
        self.tell()
        if self._settings.current.checks_releases:
            self._show_banner()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.status_changed.emit(error_text(error), self.session.newer is not None)

    @Slot()
    def _show_banner(self) -> None:
        """Show a newer release in the banner, once, as soon as the banner is free."""
        release = self.session.newer
        known = (self._shown_version, self._settings.current.dismissed_release)
        if release is None or release.version in known:
            return
        if not self._may_tell():
            self.session.look_again(LATER_MS)
            return
        self._shown_version = release.version
        self.noticed.emit(
            Notice(
                _is_out(release.version), action=tr("What's new"), on_action=self.show_news,
                stays=True, on_close=self._dismiss,
            )
        )  # fmt: skip

    def _dismiss(self) -> None:
        release = self.session.newer
        if release is not None:
            self._keep(replace(self._settings.current, dismissed_release=release.version))


def _is_out(version: str) -> str:
    return tr("Tandem {version} is available.").format(version=version)
