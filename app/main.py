"""The application: connects its parts, starts them, and ends them in order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import Slot
from PySide6.QtWidgets import QApplication

import engine
from app.chat import close_formulas
from app.core.notice import Notice, of_page
from app.core.process.engine_place import MakeHost
from app.core.process.single_window import OpenRequest
from app.devices.split.speed import MachineFacts
from app.remote.client.address import is_remote
from app.window.parts import Parts
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.setup.engine_pack.store import Origin
    from engine import ModelLoaded, Rig

log = logging.getLogger(__name__)


class Shell(Parts):
    """The running application: its parts (`Parts`), and the connections between them."""

    def __init__(self, app: QApplication, make_host: MakeHost, rig: Rig | None = None) -> None:
        super().__init__(app, make_host, rig)
        self._is_closed = False
        self._wire()

    def start(self) -> None:
        """Restore the window as it was left, and show it."""
        current, window = self.settings.current, self.window
        window.restore_layout(current.geometry, current.window_state)
        self.keeper.dock_fit.fit_screen()
        self.model_presenter.start()
        self.chat_presenter.start()
        self.models.hold()
        self.interpreter.start()
        window.show()
        window.composer.setFocus()
        self.start_up.arm()
        self.tray.apply()
        self.updates.apply()

    @Slot(str)
    def _on_host_imported(self, origin: Origin) -> None:
        if self._rig is None or origin != "none":
            self.engine_setup = self._make_engine_setup()
            self.engine_setup.noticed.connect(self._notify)
            self.engine_setup.begin(origin)
        self.chat_listing.go_on()
        self.interpreter.settle()

    @Slot()
    def save(self) -> None:
        """Save the chats as they are now: the process may be ended before `close` is through."""
        self.chat_presenter.flush()
        self.session.save_all()
        self.session.flush()

    @Slot()
    def close(self) -> None:
        """Save everything and end the engine; the window may be closed then."""
        if self._is_closed:
            return
        self.settings_page.close()
        self._is_closed = True
        self.save()
        self.start_up.close()
        self.sweeper.close()
        self.poller.stop()
        self.idle.stop()
        self.split.stop()
        for part in (self.side_panels, self.serving, self.library, self.updates, self.remote):
            part.close()
        if self.engine_setup is not None:
            self.engine_setup.close()
        if self._help is not None:
            self._help.close()
        self.sampling_presenter.close()
        self.monitor_presenter.close()
        self.tray.close()
        self.taskbar.close()
        self.models.close()
        self.chat_listing.close()
        self.session.stop_all()  # or they would hold up the caches
        self.chat_cache.close()
        self.client.shutdown()
        if self._machines is not None:
            self._machines.close()
        close_formulas()
        self.chat_presenter.files.close()
        self.session.close()
        self.tools.close()  # when nothing of it runs any more
        self._keep_layout()
        self.keeper.close()
        self.interpreter.stop()

    def _keep_layout(self) -> None:
        """Keep the window's layout and which chat is open, for the next start."""
        geometry, state = self.window.layout_state()
        self.settings.put(
            replace(
                self.settings.current,
                geometry=geometry,
                window_state=state,
                last_chat=self.session.current.id,
            )
        )

    @Slot(object, object)
    def _show_devices(self, devices: Sequence[DeviceInfo], machine: MachineFacts) -> None:
        self.poller.stop()  # it reads what has been known until now
        self.split.set_devices(devices, machine)
        wires = None if self._machines is None else self._machines.wires
        self.side_panels.set_devices(devices, self._rig, wires)
        self.monitor.set_devices(devices)
        self.interpreter.settle()
        self.models.release()
        if self._rig is None:
            self.poller.start()
        self.serving.begin()
        self.tools.session.begin()

    def _wire(self) -> None:
        presenters = self.model_presenter, self.chat_presenter, self.side_panels
        others = self.sampling_presenter, self.monitor_presenter, self.idle, self.keeper
        more = self.chat_listing, self.open_on_send, self.crashes, self.recovery, self.updates
        for source in (*presenters, *others, *more, self.remote, self.tools):
            source.noticed.connect(self._notify)
        banner = self.window.banner
        self.library.noticed.connect(lambda notice: self._notify(of_page(notice, "models")))
        self.window.page_left.connect(banner.dismiss_page)
        for another in (self.models.loading, self.models.applying):
            another.connect(banner.dismiss_load)
        self.client.finished.connect(
            lambda _, answer: banner.dismiss_failure(answer.meter.asked_at)
        )
        self.session.leaving.connect(lambda: banner.dismiss_chat(self.session.current.id))
        self._wire_window()
        self.session.answering.connect(banner.dismiss_chat)
        self.session.answering.connect(self.chat_cache.enter)
        self.session.begun.connect(self.chat_cache.begin)
        self.session.deleted.connect(self.chat_cache.delete)
        self.models.replacing.connect(self.chat_cache.leave)
        self.models.selected.connect(self.side_panels.set_model)
        self.models.loaded.connect(self._on_loaded)
        self.models.emptied.connect(lambda _: self.monitor.set_ranks(()))
        self.models.emptied.connect(self.remote.unwatch)
        loads = self.models.loading, self.models.loaded, self.models.emptied
        for signal in (*loads, self.client.unloaded, self.client.load_failed, self.client.lost):
            signal.connect(self._mark_running)
        self.library.eject_requested.connect(self.models.eject)
        self.side_panels.machines_requested.connect(lambda: self.machines.open())
        self.poller.snapshots.connect(self.split.set_snapshots)
        self.poller.snapshots.connect(self.monitor.add_snapshots)
        self.client.finished.connect(self.tray.note_answer)
        self.client.state_changed.connect(self._on_state)
        self.client.state_changed.connect(self.taskbar.note_state)
        self.client.load_progress.connect(self.taskbar.note_load)
        self.downloads.progressed.connect(self.taskbar.note_downloads)
        self.client.ready.connect(self.interpreter.settle)
        for signal in (self.client.ready, self.client.loaded):  # one that died is loaded anew
            signal.connect(self.sweeper.sweep)

    def _wire_window(self) -> None:
        window = self.window
        window.painted.connect(self.start_up.begin)
        self.start_up.host_imported.connect(self._on_host_imported)
        self.start_up.devices_found.connect(self._show_devices)
        window.model_dropped.connect(self.models.open)
        window.model_picked.connect(self.models.open)
        window.models_requested.connect(self.library.toggle)
        window.settings_requested.connect(self.settings_page.toggle)
        for source in (window, self.settings_page):
            source.shortcuts_requested.connect(lambda: self.help.show_shortcuts())
        self.settings_page.log_requested.connect(lambda: self.help.show_log())
        self.settings_page.about_requested.connect(lambda: self.help.show_about())
        self.tray.new_chat_requested.connect(self.chat_presenter.new_chat)
        self.keeper.kept.connect(self.tray.apply)
        self.keeper.kept.connect(self.updates.apply)
        window.zoom_requested.connect(self.keeper.zoom)
        self.keeper.kept.connect(self.settings_page.refresh)
        self.keeper.kept.connect(self.idle.restart)
        for part in (self.library, self.remote):
            part.opened.connect(self.models.open)
        window.model_bar.remote_requested.connect(self.remote.open)
        window.start_view.prompt_chosen.connect(self.chat_presenter.send)
        window.start_view.prompt_chosen.connect(lambda _: window.composer.setFocus())
        window.new_chat_requested.connect(self.chat_presenter.new_chat)
        window.regenerate_requested.connect(self.session.regenerate)
        window.stop_requested.connect(self.session.stop)
        window.closing.connect(self.close)
        self.serving.changed.connect(lambda: window.server.show_running(bool(self.serving.address)))
        self.session.busy_changed.connect(window.set_busy)
        self.chat_presenter.opened.connect(window.show_chat)
        self.model_presenter.changed.connect(window.show_name)

    @Slot()
    def _on_state(self) -> None:
        self.poller.set_busy(not self._is_idle())

    @Slot()
    def _mark_running(self) -> None:
        """Show in the library which model is loaded, and which is being loaded."""
        client, info = self.client, self.models.info
        loaded = "" if client.model is None else client.model.info.path
        self.library.show_running(loaded, info.path if client.is_loading and info else "")

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self.settings_page.note_load()
        self.remote.watch(loaded.info.path)
        if is_remote(loaded.info.path):
            self.monitor.set_ranks(())
            return
        devices = loaded.params.all_devices
        self.monitor.set_ranks(devices)
        if set(devices) != {"cpu"}:  # the load has measured what CUDA takes by itself
            engine.use_measured_overheads(self.start_up.devices, engine.MachineFile.of_user())

    @Slot(object)
    def take(self, request: OpenRequest) -> None:
        """Do what a second start has asked for."""
        if request.quit:
            QApplication.quit()
            return
        if request.demo:
            self.model_presenter.open_demo()
        elif request.model:
            self.models.open(request.model)
        self.window.come_to_front(request.activation)

    @Slot(object)
    def _notify(self, notice: Notice) -> None:
        log.info("%s", notice.text)
        self.tray.note(notice)
        self.window.banner.show_notice(notice)
