"""The engine page and its settings panel, created on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QMessageBox, QVBoxLayout, QWidget

from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, translated
from app.core.units import decimal_size
from app.setup.page.engine_session import (
    EngineFacts,
    EngineSession,
    InstallRequest,
    change_intro,
    environment_title,
    found_text,
    missing_intro,
    pack_title,
    room_text,
    shown_engines,
    stage_text,
)
from app.setup.page.engine_view import EngineView, has_focus
from app.widgets.buttons import button
from app.widgets.layout import FlowBox, fill
from app.widgets.text import label, plain_tip, set_tip
from engine import DeviceInfo


class EnginePanel(QWidget):
    """Settings panel with the engine in use and buttons to replace it."""

    change_requested = Signal()
    update_requested = Signal()
    roll_back_requested = Signal()
    remove_requested = Signal()
    environment_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._title, self._details = label(), label(role="muted")
        self._news = label(role="ok")
        for text in (self._title, self._details, self._news):
            text.setWordWrap(True)
        self.update_engine = button(tr("Update"), "primary")
        self.change, self.remove = button(tr("Change…")), button(tr("Remove…"))
        self.roll_back = button(tr("Go back"))
        self.environment = button(tr("Use an existing Python environment…"))
        self._controls = {
            self.update_engine: self.update_requested,
            self.change: self.change_requested,
            self.roll_back: self.roll_back_requested,
            self.environment: self.environment_requested,
            self.remove: self.remove_requested,
        }
        for control, signal in self._controls.items():
            control.clicked.connect(signal)
        self._buttons = FlowBox()
        self._buttons.set_widgets(tuple(self._controls))
        parts = self._title, self._details, self._news, self._buttons
        fill(QVBoxLayout(self), *parts, margins=(0, 6, 0, 6), spacing=6)
        self.show_engine("", "", "", {})

    @property
    def text(self) -> str:
        """The panel's text."""
        lines = (self._title.text(), self._details.text(), self._news.text())
        return "\n".join(line for line in lines if line)

    def show_engine(self, title: str, details: str, news: str, tips: dict[QWidget, str]) -> None:
        """Show the engine in use and any newer one; enable the buttons in `tips`, with tooltips."""
        for text, words in ((self._title, title), (self._details, details), (self._news, news)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setEnabled(control in tips)
            control.setAccessibleDescription(tips.get(control, ""))
            set_tip(control, tips.get(control, ""))
        self._buttons.setVisible(bool(tips))


class EngineSettings(QObject):
    """Connects an `EngineSession` to its settings panel."""

    page_requested = Signal()
    install_requested = Signal(object)  # InstallRequest
    remove_requested = Signal()

    def __init__(self, session: EngineSession, panel: EnginePanel, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._panel = session, panel
        panel.change_requested.connect(self.page_requested)
        panel.update_requested.connect(self._update)
        panel.roll_back_requested.connect(session.roll_back)
        panel.remove_requested.connect(self._remove)
        panel.environment_requested.connect(self._choose_environment)
        session.known.connect(self._show)
        session.changed.connect(self._show_again)
        self._show_again()

    @Slot()
    def _show_again(self) -> None:
        if self._session.facts is not None:
            self._show(self._session.facts)

    @Slot(object)
    def _show(self, facts: EngineFacts) -> None:
        panel, pack = self._panel, facts.current
        if self._session.state == "running":
            tips: dict[QWidget, str] = {panel.change: tr("Show the progress")}
            panel.show_engine(tr("An engine is being installed."), "", "", tips)
        elif facts.origin == "own":
            details = tr("It was installed with Tandem, which uses only this engine.")
            panel.show_engine(tr("PyTorch installed with Tandem"), details, "", {})
        elif facts.origin == "none" or pack is None:
            tips = self._tips(panel.change, panel.environment)
            hint = tr("Models can be planned, but not loaded.")
            panel.show_engine(tr("No engine is installed."), hint, "", tips)
        else:
            panel.show_engine(
                pack_title(pack), _where(facts), _news(facts), self._tips(*self._useful(facts))
            )

    def _useful(self, facts: EngineFacts) -> list[QWidget]:
        panel = self._panel
        useful: list[QWidget] = [panel.change, panel.environment, panel.remove]
        if facts.update is not None:
            useful.append(panel.update_engine)
        if facts.previous is not None and facts.previous.is_usable:
            useful.append(panel.roll_back)
        return useful

    def _tips(self, *controls: QWidget) -> dict[QWidget, str]:
        panel, facts = self._panel, self._session.facts
        previous = facts.previous if facts is not None else None
        text = tr("Go back to {engine}, which was kept")
        back = text.format(engine=pack_title(previous)) if previous is not None else ""
        tips: dict[QWidget, str] = {
            panel.change: tr("Choose another engine"),
            panel.update_engine: tr(
                "Install the newer engine; this one is kept until that one works"
            ),
            panel.roll_back: back,
            panel.environment: tr("Use PyTorch from an existing Python environment"),
            panel.remove: tr("Delete all engines that Tandem installed"),
        }
        return {control: tips[control] for control in controls}

    @Slot()
    def _update(self) -> None:
        facts = self._session.facts
        if facts is not None and facts.update is not None:
            self.install_requested.emit(InstallRequest(facts.update.backend))

    @Slot()
    def _choose_environment(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._panel, tr("Folder of a Python environment"))
        if folder:
            self.install_requested.emit(InstallRequest(environment=folder))

    @Slot()
    def _remove(self) -> None:
        text = tr("Remove all engines? Models cannot be loaded until another one is installed.")
        question = QMessageBox.question(self._panel, tr("Remove the engine"), plain_tip(text))
        if question is QMessageBox.StandardButton.Yes:
            self.remove_requested.emit()


def _where(facts: EngineFacts) -> str:
    pack = facts.current
    assert pack is not None
    if pack.is_environment:
        return pack.source
    return tr("{size} in {folder}").format(size=decimal_size(pack.n_bytes), folder=facts.folder)


def _news(facts: EngineFacts) -> str:
    if facts.update is None:
        return ""
    text = tr("A newer one is available: PyTorch {version}, download {size}.")
    lock = facts.update.lock
    return text.format(version=lock.version, size=decimal_size(lock.n_bytes))


class EnginePagePresenter(QObject):
    """Connects an `EngineSession` to its page; `devices` returns the known devices."""

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
        """Show the known devices."""
        self._view.set_found(found_text(self._devices()))

    def install(self, request: InstallRequest) -> None:
        """Start an installation."""
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
        recommended = (offer.backend for offer in facts.offers if offer.is_recommended)
        chosen = view.choices.key or next(recommended, "")
        view.choices.show_engines(shown_engines(facts), chosen)
        view.set_problem(facts.problem)
        view.wheels.setEnabled(bool(facts.offers))
        self._show_room()
        self._show_state()
        if not self._is_known and has_focus(view):
            view.focus_first()  # the control to focus has only just been created
        self._is_known = True

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
            panel.show_paused(title, share, tr("Paused. The partial download is kept."))
        elif session.state == "failed" and session.error is not None:
            panel.show_failure(
                title, translated(session.error.message), translated(session.error.hint)
            )
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
    """Page for installing an engine, shown in the middle of the window; created on first use."""

    left = Signal()
    covered = Signal()  # another page is shown instead
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
        """Keywords for the settings search."""
        return tr("PyTorch CUDA ROCm update remove environment wheels")

    @property
    def is_open(self) -> bool:
        return self.view is not None and self.view.isVisible()

    @Slot()
    def open(self) -> None:
        """Show the page and refresh it."""
        presenter = self._made()
        assert self.view is not None
        presenter.show_devices()
        self.session.look()
        self._show(self.view)
        self.view.focus_first()

    @Slot(object)
    def install(self, request: InstallRequest) -> None:
        """Show the page and start an installation."""
        self.open()
        self._made().install(request)

    def go_on(self, *, is_shown: bool) -> bool:
        """Offer to resume an unfinished installation, if there is one; return whether there is."""
        backend = self._settings.current.pending_engine
        if backend:
            self._made()
            self.session.leave_paused(InstallRequest(backend))
        if backend and is_shown:
            self.open()
        return bool(backend)

    def show_devices(self) -> None:
        """Show the known devices."""
        if self._presenter is not None:
            self._presenter.show_devices()

    def make_panel(self) -> EnginePanel:
        """Create the panel for the settings page."""
        panel = EnginePanel()
        part = EngineSettings(self.session, panel, self)
        part.page_requested.connect(self.open)
        part.install_requested.connect(self.install)
        part.remove_requested.connect(self.remove_requested)
        self.session.look()
        return panel

    def close(self) -> None:
        """Stop a running installation; a later window can resume it."""
        self.session.close()

    def _made(self) -> EnginePagePresenter:
        if self._presenter is None:
            # imported here because the window's first frame does not need it
            from app.setup.page.engine_view import EngineView

            self.view = EngineView()
            self.view.left.connect(self.left)
            self.view.covered.connect(self.covered)
            self._presenter = EnginePagePresenter(
                self.session, self.view, self._devices, self._settings, self._keep, self
            )
        return self._presenter
