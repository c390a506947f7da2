"""Connects the page of the engine with the session of its installation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QFileDialog

from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.setup.page.session import EngineFacts, EngineSession, InstallRequest
from app.setup.page.texts import (
    change_intro,
    environment_title,
    found_text,
    missing_intro,
    room_text,
    shown_engines,
    stage_text,
)
from app.setup.page.views.engine_view import EngineView, has_focus
from engine import DeviceInfo


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
