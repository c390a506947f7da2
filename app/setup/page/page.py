"""The engine's part of a window: its page and its panel of the settings, made when first wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.setup.page.session import EngineSession, InstallRequest
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.setup.page.presenter import EnginePagePresenter
    from app.setup.page.views.engine_panel import EnginePanel
    from app.setup.page.views.engine_view import EngineView


class EnginePage(QObject):
    """Page to install an engine, shown in the middle of the window.

    Args:
        devices: returns the devices of this machine as far as they are known.
        keep: stores settings and has them written.
        show: shows a widget in the middle of the window.
        leave: shows the chat there again.

    Attributes:
        view: the page; None until it is wanted.
    """

    left = Signal()
    covered = Signal()  # something else is shown in its place
    remove_requested = Signal()

    def __init__(
        self,
        devices: Callable[[], Sequence[DeviceInfo]],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        show: Callable[[QWidget], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._devices, self._settings, self._keep, self._show = devices, settings, keep, show
        self.session = EngineSession(self)
        self.view: EngineView | None = None
        self._presenter: EnginePagePresenter | None = None

    @property
    def words(self) -> str:
        """Words by which the search of the settings finds its panel."""
        return tr("PyTorch CUDA ROCm update remove environment wheels")

    @property
    def is_open(self) -> bool:
        return self.view is not None and self.view.isVisible()

    @Slot()
    def open(self) -> None:
        """Show the page, with what is known now; what takes longer follows."""
        presenter = self._made()
        assert self.view is not None
        presenter.show_devices()
        self.session.look()
        self._show(self.view)
        self.view.focus_first()

    @Slot(object)
    def install(self, request: InstallRequest) -> None:
        """Show the page, which installs something."""
        self.open()
        self._made().install(request)

    def go_on(self, *, is_shown: bool) -> bool:
        """Offer to go on with what another window has left unfinished.

        Args:
            is_shown: whether to show the page if there is something.

        Returns:
            whether there is something.
        """
        backend = self._settings.current.pending_engine
        if backend:
            self._made()
            self.session.leave_paused(InstallRequest(backend))
        if backend and is_shown:
            self.open()
        return bool(backend)

    def show_devices(self) -> None:
        """Name the devices as they are known now."""
        if self._presenter is not None:
            self._presenter.show_devices()

    def make_panel(self) -> EnginePanel:
        """Return the panel of the settings page."""
        from app.setup.page.settings_part import EngineSettings
        from app.setup.page.views.engine_panel import EnginePanel

        panel = EnginePanel()
        part = EngineSettings(self.session, panel, self)
        part.page_requested.connect(self.open)
        part.install_requested.connect(self.install)
        part.remove_requested.connect(self.remove_requested)
        self.session.look()
        return panel

    def close(self) -> None:
        """Stop what runs, which a later window can go on with."""
        self.session.close()

    def _made(self) -> EnginePagePresenter:
        """Return the presenter of the page, which is made now if there is none."""
        if self._presenter is None:
            # imported here, since the window's first picture does not need them
            from app.setup.page.presenter import EnginePagePresenter
            from app.setup.page.views.engine_view import EngineView

            self.view = EngineView()
            self.view.left.connect(self.left)
            self.view.covered.connect(self.covered)
            self._presenter = EnginePagePresenter(
                self.session, self.view, self._devices, self._settings, self._keep, self
            )
        return self._presenter
