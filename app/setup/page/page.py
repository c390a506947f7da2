"""The engine's part of a window: its page and its panel of the settings, made when first wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QWidget

from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.setup.page.engine_view import EngineView, has_focus
from app.setup.page.session import (
    EngineFacts,
    EngineSession,
    InstallRequest,
    change_intro,
    environment_title,
    found_text,
    missing_intro,
    room_text,
    shown_engines,
    stage_text,
)
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.setup.page.settings_part import EnginePanel


class EnginePagePresenter(QObject):
    """Connection of one `EngineSession` with its page.

    Args:
        devices: returns the devices of this machine as far as they are known.
        keep: stores settings and has them written.
    """

    def __init__(
        self,
        session: EngineSession,
        view: EngineView,
        devices: Callable[[], Sequence[DeviceInfo]],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._view, self._devices = session, view, devices
        self._settings, self._keep = settings, keep
        self._is_known = False
        view.install_requested.connect(lambda key: self.install(InstallRequest(key)))
        view.wheels_requested.connect(self._choose_wheels)
        view.environment_requested.connect(self._choose_environment)
        view.choices.chosen.connect(self._show_room)
        panel = view.panel
        panel.pause_requested.connect(session.pause)
        panel.resume_requested.connect(session.resume)
        panel.cancel_requested.connect(session.cancel)
        panel.leave_requested.connect(session.leave)
        session.known.connect(self._show_facts)
        session.changed.connect(self._on_changed)
        if session.facts is not None:
            self._show_facts(session.facts)
        self._show_state()

    def show_devices(self) -> None:
        """Name the devices as they are known now."""
        self._view.set_found(found_text(self._devices()))

    def install(self, request: InstallRequest) -> None:
        """Install what a person has chosen."""
        had_focus = has_focus(self._view)
        self._session.install(request)
        if had_focus:
            self._view.focus_first()

    @Slot(object)
    def _show_facts(self, facts: EngineFacts) -> None:
        view = self._view
        used = facts.current if facts.origin == "pack" else None
        view.set_intro(change_intro(used) if used is not None else missing_intro(facts.current))
        self.show_devices()
        chosen = view.choices.key or self._proposed(facts)
        view.choices.show_engines(shown_engines(facts), chosen)
        view.set_problem(facts.problem)
        view.wheels.setEnabled(bool(facts.offers))
        self._show_room()
        self._show_state()
        if not self._is_known and has_focus(view):
            view.focus_first()  # what it goes to first is there only now
        self._is_known = True

    @staticmethod
    def _proposed(facts: EngineFacts) -> str:
        """Return the kind of engine that is chosen at first."""
        recommended = (offer.backend for offer in facts.offers if offer.is_recommended)
        return next(recommended, "")

    @Slot()
    def _show_room(self) -> None:
        facts = self._session.facts
        offer = facts.offer(self._view.choices.key) if facts is not None else None
        if facts is None or offer is None:
            self._view.set_space("")
            return
        needed = offer.lock.n_bytes + offer.lock.unpacked_bytes
        text = room_text(facts.folder, facts.free_bytes, needed)
        self._view.set_space(text, is_short=facts.free_bytes < needed)

    @Slot()
    def _on_changed(self) -> None:
        """Show the installation, and remember what a later window can go on with."""
        session = self._session
        goes_on = session.state != "idle" and session.request.is_fetched
        pending = session.request.backend if goes_on else ""
        if pending != self._settings.current.pending_engine:
            self._keep(replace(self._settings.current, pending_engine=pending))
        self._show_state()

    def _show_state(self) -> None:
        session, panel = self._session, self._view.panel
        title = tr("Installing {engine}").format(engine=self._title())
        if session.state == "failed":
            title = tr("{engine} is not installed").format(engine=self._title())
        share = None
        if session.total_bytes:
            share = session.progress.n_bytes / session.total_bytes
        stage = stage_text(session.stage, session.progress, session.total_bytes)
        if session.state == "running":
            panel.show_running(title, share, stage, pauses=not session.request.environment)
        elif session.state == "paused":
            panel.show_paused(title, share, tr("Paused. What has arrived is kept."))
        elif session.state == "failed" and session.error is not None:
            panel.show_failure(title, session.error.message, session.error.hint)
        if session.state == "idle":
            self._view.show_choice()
        else:
            self._view.show_panel()

    def _title(self) -> str:
        request, facts = self._session.request, self._session.facts
        if request.environment:
            return environment_title()
        offer = facts.offer(request.backend) if facts is not None else None
        if offer is None:
            return request.backend
        return f"PyTorch {offer.lock.version}, {offer.title}"

    @Slot()
    def _choose_wheels(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._view, tr("Folder of wheels"))
        if folder:
            self.install(InstallRequest(self._view.choices.key, wheels=folder))

    @Slot()
    def _choose_environment(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._view, tr("Folder of a Python environment"))
        if folder:
            self.install(InstallRequest(environment=folder))


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
        from app.setup.page.settings_part import EnginePanel, EngineSettings

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
            from app.setup.page.engine_view import EngineView
            from app.setup.page.page import EnginePagePresenter

            self.view = EngineView()
            self.view.left.connect(self.left)
            self.view.covered.connect(self.covered)
            self._presenter = EnginePagePresenter(
                self.session, self.view, self._devices, self._settings, self._keep, self
            )
        return self._presenter
