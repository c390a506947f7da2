"""The application: its parts, their connections, and the order in which they start and close."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QApplication, QWidget

import engine
from app.chat import close_formulas
from app.chat.cache import ChatCache
from app.chat.chat_presenter import ChatPresenter
from app.chat.library import ChatLibrary
from app.chat.listing.chat_listing import ChatListing
from app.chat.running import RunningPresenter
from app.chat.sampling.sampling_presenter import SamplingPresenter
from app.chat.session import ChatSession
from app.chat.store import ChatStore
from app.chat.switches import ThinkingSwitch
from app.core import paths
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice, of_page
from app.core.process.crash import CrashReporter
from app.core.process.environment import MakeHost
from app.core.process.single_window import OpenRequest
from app.core.process.spare_time import Interpreter, Sweeper
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, tr_later
from app.core.units import GIB
from app.devices.monitor.monitor_presenter import DevicePoller, MonitorPresenter
from app.devices.monitor.views.monitor_panel import MonitorHead, MonitorPanel
from app.devices.split.session import SplitSession
from app.devices.split.speed import MachineFacts
from app.devices.split.views.split_panel import SplitPanel
from app.models.current.model_session import ModelPresenter, ModelSession, ModelViews
from app.models.downloads.page import DownloadsPart
from app.models.library.page import LibraryPage
from app.remote.client.address import is_remote
from app.remote.page.part import RemotePart
from app.server.page.session import ServerSession
from app.setup.updates.update_session import UpdatePresenter
from app.tools.page.tool_session import ToolSession
from app.widgets.theme import apply_theme
from app.window.auto_load import IdleUnloader, OpenOnSend
from app.window.desktop import AnswerFigures, TaskbarProgress, Tray, painter_for
from app.window.keeper import SettingsKeeper, start_language
from app.window.main_window import MainWindow, Panels
from app.window.parts import if_made, make_parts, part
from app.window.preferences.settings_view import SettingsPage
from app.window.side_panels import SidePanels
from app.window.start_up import Recovery, StartUp
from engine import DeviceInfo, EngineError, LoadParams

if TYPE_CHECKING:
    from app.chat.switches import ToolSwitch
    from app.remote.machines.part import MachinesPart
    from app.setup.engine_pack.activation import Origin
    from app.tools.page.tool_dialog import ToolPresenter
    from app.window.engine_setup import EngineSetup
    from app.window.help.dialogs import HelpDialogs
    from engine import ModelLoaded, Rig

log = logging.getLogger(__name__)


class Shell(QObject):
    """The running application.

    Its parts are created in declaration order, late parts on first use, after the first frame. A
    part's `needs` are all parts that its method reads while it runs, but not those that its lambdas
    read later.

    Args:
        make_host: starts an engine that sends its events to the given callable.
        rig: simulated machine to plan for, if any; with a rig, models cannot be loaded.
    """

    def __init__(self, app: QApplication, make_host: MakeHost, rig: Rig | None = None) -> None:
        super().__init__(app)
        self._app, self._make_local, self._rig = app, make_host, rig
        self._is_closed = False
        make_parts(self)
        self._wire()

    # services and the split

    @part()
    def settings(self) -> SettingsStore:
        imaginary = () if self._rig is None else ("plans",)  # these are for nonexistent devices
        settings = SettingsStore(paths.settings_file(), imaginary)
        start_language(self._app, settings.current.language)
        apply_theme(self._app, settings.current.theme, settings.current.zoom)
        return settings

    @part(needs=["settings"])
    def monitor(self) -> MonitorPanel:
        return MonitorPanel()

    @part(needs=["settings", "monitor"])
    def remote(self) -> RemotePart:
        return RemotePart(
            self._make_local, self._is_engine_missing, self.settings, self.keep, self.monitor,
            lambda on_event: self.machines.make_host(on_event), self,
        )  # fmt: skip

    @part(needs=["remote"])
    def client(self) -> EngineClient:
        return EngineClient(self.remote.make_host, self)

    @part()
    def start_up(self) -> StartUp:
        start_up = StartUp(self._rig, self)
        start_up.host_imported.connect(self._on_host_imported)
        start_up.devices_found.connect(self._show_devices)
        return start_up

    @part(needs=["start_up"])
    def split(self) -> SplitSession:
        return SplitSession(machine_factory=self.start_up.machine, parent=self)

    @part(needs=["settings", "split"])
    def split_panel(self) -> SplitPanel:
        return SplitPanel(self.split)

    @part(needs=["settings"])
    def monitor_head(self) -> MonitorHead:
        return MonitorHead()

    @part(needs=["client", "settings"])
    def serving(self) -> ServerSession:
        return ServerSession(self.client, self.settings, self.keep, self)

    @part()
    def tools(self) -> ToolSession:
        return ToolSession(self)

    @part(needs=["split", "client", "split_panel", "serving"])
    def side_panels(self) -> SidePanels:
        side = SidePanels(self.split, self.client, self.split_panel, self.serving, self)
        self.split_panel.footer.add_button(side.find)
        side.machines_requested.connect(lambda: self.machines.open())
        return side

    # the window

    @part(needs=["split_panel", "side_panels", "monitor", "monitor_head", "start_up", "serving"])
    def window(self) -> MainWindow:
        side = self.side_panels
        places = side.plans, side.map_place, side.links_place, side.server_place
        window = MainWindow(Panels(self.split_panel, *places, self.monitor, self.monitor_head))
        window.painted.connect(self.start_up.begin)
        window.closing.connect(self.close)
        window.page_left.connect(window.banner.dismiss_page)
        self.serving.changed.connect(lambda: window.server.show_running(bool(self.serving.address)))
        return window

    @part(needs=["settings", "window"])
    def keeper(self) -> SettingsKeeper:
        keeper = SettingsKeeper(self._app, self.settings, self.window, self)
        self.window.zoom_requested.connect(keeper.zoom)
        return keeper

    @part(needs=["client", "split"])
    def models(self) -> ModelSession:
        return ModelSession(self.client, self._load_params, self, self.split.suggester)

    @part(needs=["client", "tools"])
    def session(self) -> ChatSession:
        return ChatSession(
            ChatLibrary(ChatStore(paths.chats_dir()), self), self.client,
            sampling=lambda chat: self.sampling_presenter.params_for(chat), tools=self.tools,
            parent=self,
        )  # fmt: skip

    @part(needs=["client", "settings"])
    def chat_cache(self) -> ChatCache:
        n_gib = self.settings.current.chat_cache_gib
        return ChatCache(paths.chat_caches_dir(), self.client, n_gib * GIB, self)

    @part(needs=["split", "monitor"])
    def poller(self) -> DevicePoller:
        poller = DevicePoller(self)
        poller.snapshots.connect(self.split.set_snapshots)
        poller.snapshots.connect(self.monitor.add_snapshots)
        return poller

    @part(needs=["client"])
    def interpreter(self) -> Interpreter:
        interpreter = Interpreter(self._is_idle, self)
        self.client.ready.connect(interpreter.settle)
        return interpreter

    @part(needs=["client"])
    def sweeper(self) -> Sweeper:
        swept = paths.chat_caches_dir(), paths.settings_file().parent, paths.engines_dir()
        sweeper = Sweeper(swept, self)
        for signal in (self.client.ready, self.client.loaded):  # also after a crash
            signal.connect(sweeper.sweep)
        return sweeper

    @part()
    def crashes(self) -> CrashReporter:
        return CrashReporter(self)

    @part(needs=["models", "window", "split", "settings"])
    def model_presenter(self) -> ModelPresenter:
        window = self.window
        pages = ModelViews(window.model_bar, window.start_view)
        presenter = ModelPresenter(self.models, pages, self.split, self.settings, self.keep, self)
        presenter.changed.connect(window.show_name)
        window.model_dropped.connect(self.models.open)
        window.model_picked.connect(self.models.open)
        window.model_bar.remote_requested.connect(lambda: self.remote.open())
        return presenter

    # chats

    @part(needs=["window", "session", "client", "settings"])
    def sampling_presenter(self) -> SamplingPresenter:
        window = self.window
        presenter = SamplingPresenter(
            window.sampling, self.session, self.client, self.settings, self.keep, self
        )
        presenter.summary_changed.connect(window.composer.set_sampling_summary)
        return presenter

    @part(needs=["client", "models", "window", "settings"])
    def idle(self) -> IdleUnloader:
        return IdleUnloader(
            self.client, self.models, self.window.composer,
            lambda: self.settings.current.unload_after_min, self,
        )  # fmt: skip

    @part(needs=["session", "client", "window", "settings", "sampling_presenter", "idle"])
    def chat_presenter(self) -> ChatPresenter:
        window = self.window
        presenter = ChatPresenter(
            self.session, self.client, window.chat_view, window.composer,
            self.settings, self.keep, self.sampling_presenter.flush, self.idle.wake, self,
        )  # fmt: skip
        presenter.opened.connect(window.show_chat)
        window.start_view.prompt_chosen.connect(presenter.send)
        window.start_view.prompt_chosen.connect(lambda _: window.composer.setFocus())
        window.new_chat_requested.connect(presenter.new_chat)
        window.regenerate_requested.connect(self.session.regenerate)
        window.stop_requested.connect(self.session.stop)
        return presenter

    @part(needs=["window", "session", "client", "tools"])
    def thinking(self) -> ThinkingSwitch:
        switch = ThinkingSwitch(self.window.composer, self.session, self.client, self)
        self.tools.changed.connect(self._on_tools)
        return switch

    @part(needs=["session", "client", "chat_presenter", "window", "settings"])
    def chat_listing(self) -> ChatListing:
        return ChatListing(
            self.session, self.client, self.chat_presenter, self.window.chat_list,
            paths.chat_folders_file(), paths.chat_index_file(),
            lambda: self.settings.current.auto_titles, self,
        )  # fmt: skip

    @part(needs=["session", "client", "chat_presenter", "window"])
    def running(self) -> RunningPresenter:
        return RunningPresenter(
            self.session, self.client, self.chat_presenter, self.window.running, self
        )

    # pages shown instead of the chat

    @part(needs=["split", "settings", "window", "models"])
    def library(self) -> LibraryPage:
        show = partial(self.window.show_page, "models")
        library = LibraryPage(self.split, self.settings, self.keep, show, self._show_chat, self)
        self.window.models_requested.connect(library.toggle)
        library.eject_requested.connect(self.models.eject)
        return library

    @part(needs=["library", "settings", "window"])
    def downloads(self) -> DownloadsPart:
        downloads = DownloadsPart(
            self.library.situation, self.settings, self.keep, self._is_idle, self
        )
        self.library.add(downloads)
        for page in (self.library, self.window.start_view):
            page.download_requested.connect(partial(self.library.show_part, downloads))
        return downloads

    @part(needs=["monitor", "monitor_head", "settings"])
    def monitor_presenter(self) -> MonitorPresenter:
        return MonitorPresenter(self.monitor, self.monitor_head, self.settings, self.keep, self)

    @part(needs=["window", "settings"])
    def updates(self) -> UpdatePresenter:
        window = self.window
        return UpdatePresenter(
            window, self.settings, self.keep, lambda: window.banner.notice is None, self
        )

    @part(needs=["settings", "window", "updates"])
    def settings_page(self) -> SettingsPage:
        page = SettingsPage(
            self.settings, self.keep, partial(self.window.show_page, "settings"), self._show_chat,
            lambda: Tray.problems() | self.updates.problems(), self,
        )  # fmt: skip
        words = tr("MCP Model Context Protocol server plugin function call")
        page.add_panel(tr_later("Tools"), self._make_tool_panel, words)
        self.window.settings_requested.connect(page.toggle)
        for source in (self.window, page):
            source.shortcuts_requested.connect(lambda: self.help.show_shortcuts())
        page.log_requested.connect(lambda: self.help.show_log())
        page.about_requested.connect(lambda: self.help.show_about())
        return page

    # around the window

    @part(needs=["window", "settings", "chat_presenter", "client"])
    def tray(self) -> Tray:
        tray = Tray(self.window, self.settings, self)
        tray.new_chat_requested.connect(self.chat_presenter.new_chat)
        self.client.finished.connect(tray.note_answer)
        return tray

    @part(needs=["window", "client", "downloads"])
    def taskbar(self) -> TaskbarProgress:
        taskbar = TaskbarProgress(lambda: painter_for(self.window), self)
        self.client.state_changed.connect(taskbar.note_state)
        self.client.load_progress.connect(taskbar.note_load)
        self.downloads.progressed.connect(taskbar.note_downloads)
        return taskbar

    @part(needs=["client", "session", "monitor", "split", "side_panels", "library"])
    def figures(self) -> AnswerFigures:
        return AnswerFigures(
            self.client, self.session, self.monitor, self.split, self.side_panels, self.library,
            self,
        )  # fmt: skip

    @part(needs=["client", "models", "session", "window", "settings"])
    def open_on_send(self) -> OpenOnSend:
        return OpenOnSend(
            self.client, self.models, self.session, self.window.composer, self.settings, self
        )

    @part(needs=["client", "models", "session", "chat_presenter"])
    def recovery(self) -> Recovery:  # last: its notice about a lost model has a button
        flush = self.chat_presenter.flush
        return Recovery(self.client, self.models, self.session, flush, self)

    # late

    @part(needs=["models", "monitor", "start_up", "poller", "remote"], is_late=True)
    def machines(self) -> MachinesPart:
        from app.remote.machines.part import MachinesPart  # imported late: rarely used

        machines = MachinesPart(
            lambda: self.models.info.path if self.models.info else "", self.monitor, self
        )
        self.start_up.others = lambda: (machines.team.devices, machines.wires)
        self.poller.others = lambda: machines.team.states
        machines.changed.connect(self.start_up.look_again)
        machines.completed.connect(self.remote.meet_team)
        return machines

    @part(needs=["window", "settings", "start_up", "session", "updates"], is_late=True)
    def help(self) -> HelpDialogs:
        from app.window.help.dialogs import HelpDialogs

        dialogs = HelpDialogs(
            self.window, paths.log_file(), self.settings, lambda: self.start_up.devices,
            lambda: [chat.title for chat in self.session.library.summaries], self,
        )  # fmt: skip
        dialogs.check_requested.connect(self.updates.check)
        dialogs.news_requested.connect(self.updates.show_news)
        dialogs.about_made.connect(self.updates.tell)
        self.updates.status_changed.connect(dialogs.show_update)
        return dialogs

    @part(needs=["tools", "monitor"], is_late=True)
    def tool_presenter(self) -> ToolPresenter:
        from app.tools.page.tool_dialog import ToolPresenter

        return ToolPresenter(self.tools, self.monitor.window(), self)

    @part(needs=["window", "session", "tools"], is_late=True)
    def tool_switch(self) -> ToolSwitch:
        from app.chat.switches import ToolSwitch

        return ToolSwitch(self.window.composer, self.session, self.tools, self)

    @part(
        needs=[
            "start_up", "settings", "window", "settings_page", "client", "models", "session",
            "side_panels",
        ],
        is_late=True,
    )  # fmt: skip
    def engine_setup(self) -> EngineSetup:
        from app.setup.page.page import EnginePage
        from app.window.engine_setup import EngineSetup

        page = EnginePage(
            lambda: self.start_up.devices, self.settings, self.keep,
            partial(self.window.show_page, "engine"), self,
        )  # fmt: skip
        self.settings_page.add_panel(tr_later("Engine"), page.make_panel, page.words)
        setup = EngineSetup(
            self.client, self.models, self.session, self.start_up, page, self._show_chat, self
        )
        setup.missing_changed.connect(self.side_panels.set_engine_missing)
        setup.noticed.connect(self._notify)
        return setup

    # connections

    def _wire(self) -> None:
        presenters = self.model_presenter, self.chat_presenter, self.side_panels
        others = self.sampling_presenter, self.monitor_presenter, self.idle, self.keeper
        more = self.chat_listing, self.open_on_send, self.crashes, self.recovery, self.updates
        for source in (*presenters, *others, *more, self.remote, self.tools):
            source.noticed.connect(self._notify)
        banner, session, models, client = (
            self.window.banner, self.session, self.models, self.client,
        )  # fmt: skip
        self.library.noticed.connect(lambda notice: self._notify(of_page(notice, "models")))
        for another in (models.loading, models.applying):
            another.connect(banner.dismiss_load)
        client.finished.connect(lambda _, answer: banner.dismiss_failure(answer.meter.asked_at))
        session.leaving.connect(lambda: banner.dismiss_chat(session.current.id))
        session.answering.connect(banner.dismiss_chat)
        session.answering.connect(self.chat_cache.enter)
        session.begun.connect(self.chat_cache.begin)
        session.deleted.connect(self.chat_cache.delete)
        session.busy_changed.connect(self.window.set_busy)
        for page in (self.library, self.remote):
            page.opened.connect(models.open)
        models.replacing.connect(self.chat_cache.leave)
        models.selected.connect(self.side_panels.set_model)
        models.loaded.connect(self._on_loaded)
        models.emptied.connect(lambda _: self.monitor.set_ranks(()))
        models.emptied.connect(self.remote.unwatch)
        loads = models.loading, models.loaded, models.emptied
        for signal in (*loads, client.unloaded, client.load_failed, client.lost):
            signal.connect(self._mark_running)
        client.state_changed.connect(lambda: self.poller.set_busy(not self._is_idle()))
        for used in (self.tray.apply, self.updates.apply, self.settings_page.refresh):
            self.keeper.kept.connect(used)
        self.keeper.kept.connect(self.idle.restart)

    # start and shutdown

    def start(self) -> None:
        """Restore the window's layout and show the window."""
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
            self.engine_setup.begin(origin)
        self.chat_listing.go_on()
        self.interpreter.settle()

    @Slot(object, object)
    def _show_devices(self, devices: Sequence[DeviceInfo], machine: MachineFacts) -> None:
        self.poller.stop()  # it was polling the old devices
        self.split.set_devices(devices, machine)
        wires = machines.wires if (machines := if_made(self, "machines")) else None
        self.side_panels.set_devices(devices, self._rig, wires)
        self.monitor.set_devices(devices)
        self.interpreter.settle()
        self.models.release()
        if self._rig is None:
            self.poller.start()
        self.serving.begin()
        self.tools.begin()

    @Slot()
    def save(self) -> None:
        """Save the chats; the process may be killed before `close` has finished."""
        self.chat_presenter.flush()
        self.session.save_all()
        self.session.flush()

    @Slot()
    def close(self) -> None:
        """Save everything and close the engine, before the window closes."""
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
        for one in (self.side_panels, self.serving, self.library, self.updates, self.remote):
            one.close()
        for late in ("engine_setup", "help"):
            if (made := if_made(self, late)) is not None:
                made.close()
        shown = self.sampling_presenter, self.monitor_presenter, self.tray, self.taskbar
        for view in (*shown, self.models, self.chat_listing):
            view.close()
        self.session.stop_all()  # running answers would delay the caches
        self.chat_cache.close()
        self.client.shutdown()
        if (machines := if_made(self, "machines")) is not None:
            machines.close()
        close_formulas()
        self.chat_presenter.files.close()
        self.session.close()
        self.tools.close()  # after all its users
        geometry, state = self.window.layout_state()
        current, chat = self.settings.current, self.session.current.id
        self.settings.put(replace(current, geometry=geometry, window_state=state, last_chat=chat))
        self.keeper.close()
        self.interpreter.stop()

    # requests from the parts

    @Slot()
    def _mark_running(self) -> None:
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
        if set(devices) != {"cpu"}:  # the load has measured the memory that CUDA itself uses
            engine.use_measured_overheads(self.start_up.devices, engine.MachineFile.of_user())

    def _make_tool_panel(self) -> QWidget:
        from app.tools.page.tool_dialog import ToolPanel

        panel = ToolPanel(lambda: self.tools.states)
        panel.change.clicked.connect(lambda: self.tool_presenter.open())
        self.tools.changed.connect(panel.refresh)
        return panel

    @Slot()
    def _on_tools(self) -> None:
        self.tool_switch  # noqa: B018 creates it
        self.session.tools_changed.emit()

    def _is_engine_missing(self) -> bool:
        setup = if_made(self, "engine_setup")
        return setup is not None and setup.is_missing

    def keep(self, settings: Settings) -> None:
        """Apply and save settings."""
        self.keeper.keep(settings)

    def _show_chat(self) -> None:
        self.window.show_chat(not self.session.current.is_empty)
        self.window.composer.setFocus()

    def _load_params(self) -> LoadParams:
        if self._rig is not None:
            raise EngineError(engine.SIMULATED)
        return self.split.load_params()

    def _is_idle(self) -> bool:
        return self.client.state not in (EngineState.GENERATING, EngineState.LOADING)

    @Slot(object)
    def take(self, request: OpenRequest) -> None:
        """Handle a request from a second start."""
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
