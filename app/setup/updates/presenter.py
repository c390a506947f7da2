"""The telling of a newer release: in a banner, on the page about Tandem, and what is new in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.setup.updates.session import UpdateSession
from engine import EngineError

if TYPE_CHECKING:
    from app.setup.updates.views.news_dialog import NewsDialog

LATER_MS: Final = 60_000
"""Milliseconds after which a banner that was taken is looked at again."""


class UpdatePresenter(QObject):
    """Connection of the session with the banner and the dialogs.

    Args:
        over: the window that dialogs belong to.
        may_tell: returns whether the banner has nothing else to say.
    """

    noticed = Signal(object)  # Notice
    told = Signal(str, bool)  # what the page about Tandem says; whether there is news to show

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
        self.session.asking.connect(lambda: self.told.emit(tr("Asking …"), False))
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
        self.told.emit(_is_out(newer.version) if newer else "", newer is not None)

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
            from app.setup.updates.views.news_dialog import NewsDialog

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
            self.told.emit(tr("This is the newest release."), False)
            return
        self.tell()
        if self._settings.current.checks_releases:
            self._show_banner()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.told.emit(f"{error.message} {error.hint}".strip(), self.session.newer is not None)

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
