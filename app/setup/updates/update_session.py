"""The question for the newest release: when it is asked, and what is known from it. No widgets."""

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
from app.core.translation import tr
from app.setup.updates.release import Release, is_web_page
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page
from app.widgets.text import label
from engine import EngineError, package_version

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


class NewsDialog(PageDialog):
    """Page with the news of a release as plain text."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("New release"), parent, (640, 520))
        self._page = ""
        self.head_line = label()
        self.head_line.setWordWrap(True)
        self.head.addWidget(self.head_line)
        self.text = plain_page(tr("What is new"))
        self.set_content(self.text)
        self.address = label(role="muted")
        self.address.setWordWrap(True)
        self.column.insertWidget(2, self.address)
        self.visit = button(tr("Open the download page"))
        self.visit.clicked.connect(self._open)
        self.foot.insertWidget(0, self.visit)

    def show_release(self, release: Release, own: str) -> None:
        """Show a release beside the version that runs here."""
        line = tr("Tandem {version} is out; this is {own}. Tandem never replaces itself.")
        self.head_line.setText(line.format(version=release.version, own=own))
        self.text.setPlainText(release.news or tr("This release does not say what is new."))
        self._page = release.page
        self.address.setText(release.page)

    @Slot()
    def _open(self) -> None:
        if is_web_page(self._page):
            QDesktopServices.openUrl(QUrl(self._page))


LATER_MS: Final = 60_000
"""Milliseconds after which a banner that was taken is looked at again."""


class UpdatePresenter(QObject):
    """Connection of the session with the banner and the dialogs.

    Args:
        over: the window that dialogs belong to.
        may_tell: returns whether the banner has nothing else to say.
    """

    noticed = Signal(object)  # Notice
    status_changed = Signal(
        str, bool
    )  # what the page about Tandem says; whether there is news to show

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
        self.session.asking.connect(lambda: self.status_changed.emit(tr("Asking …"), False))
        self.session.answered.connect(self._on_answered)
        self.session.failed.connect(self._on_failed)
        self.session.looked.connect(self._show_banner)

    @Slot()
    def apply(self) -> None:
        """Look for releases, or end it, as the settings say."""
        self.session.apply()

    @Slot()
    def tell(self) -> None:
        """Tell what is known, without asking."""
        newer = self.session.newer
        self.status_changed.emit(_is_out(newer.version) if newer else "", newer is not None)

    @Slot()
    def check(self) -> None:
        """Ask now, as a click wants it."""
        self.session.check()

    @Slot()
    def show_news(self) -> None:
        """Show what is new, and where it can be downloaded."""
        release = self.session.newer
        if release is None:
            return
        if self.dialog is None:
            self.dialog = NewsDialog(self._over)
        self.dialog.show_release(release, self.session.version)
        self.dialog.appear()
        self._dismiss()

    def problems(self) -> dict[str, str]:
        """Return why settings have no effect, by name."""
        from app.setup.updates.release import is_web_page

        current = self._settings.current
        if current.release_address and not is_web_page(current.release_address.strip()):
            return {"release_address": tr("Only addresses that begin with https:// are asked.")}
        if current.checks_releases and not self.session.address:
            return {"checks_releases": tr("No address came with this Tandem: enter one below.")}
        return {}

    def close(self) -> None:
        """Ask no more, and close the dialog."""
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
        self.status_changed.emit(
            f"{error.message} {error.hint}".strip(), self.session.newer is not None
        )

    @Slot()
    def _show_banner(self) -> None:
        """Say once that a newer release is out, when nothing else is being said."""
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
                _is_out(release.version), action=tr("What is new"), on_action=self.show_news,
                stays=True, on_close=self._dismiss,
            )
        )  # fmt: skip

    def _dismiss(self) -> None:
        """Say no more of this release by itself."""
        release = self.session.newer
        if release is not None:
            self._keep(replace(self._settings.current, dismissed_release=release.version))


def _is_out(version: str) -> str:
    return tr("Tandem {version} is out.").format(version=version)
