"""Makes the parts of the application, and gives each what it needs of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QApplication

import engine
from app.chat.cache import ChatCache
from app.chat.chat_presenter import ChatPresenter, ChatViews
from app.chat.library import ChatLibrary
from app.chat.listing.chat_listing import ChatListing, ListPlaces
from app.chat.running import RunningPresenter
from app.chat.sampling.sampling_presenter import SamplingPresenter
from app.chat.session import ChatSession
from app.chat.store import ChatStore
from app.chat.switches import ThinkingSwitch
from app.core import paths
from app.core.engine_client import EngineClient, EngineState
from app.core.process.crash import CrashReporter
from app.core.process.engine_place import MakeHost
from app.core.process.spare_time import Interpreter, Sweeper
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr_later
from app.core.units import GIB
from app.devices.monitor.presenter import DevicePoller, MonitorPresenter
from app.devices.monitor.views.monitor_panel import MonitorHead, MonitorPanel
from app.devices.split.presenter import SplitPresenter
from app.devices.split.session import SplitSession
from app.devices.split.views.split_panel import SplitPanel
from app.models.current.presenter import ModelPresenter, ModelViews
from app.models.current.session import ModelSession
from app.models.downloads.page import DownloadsPart
from app.models.library.page import LibraryPage
from app.remote.page.part import RemotePart
from app.server.page.session import ServerSession
from app.setup.updates.session import UpdatePresenter
from app.widgets.theme import apply_theme
from app.window.appearance import start_language
from app.window.idle import IdleUnloader
from app.window.keeper import SettingsKeeper
from app.window.main_window import MainWindow, Panels
from app.window.open_on_send import OpenOnSend
from app.window.preferences.settings_view import SettingsPage
from app.window.side_panels import SidePanels
from app.window.start_up import Recovery, StartUp
from app.window.taskbar import TaskbarProgress, painter_for
from app.window.tools_part import ToolPart
from app.window.tray import AnswerFigures, Tray
from engine import EngineError, LoadParams

if TYPE_CHECKING:
    from app.chat.switches import ToolSwitch
    from app.remote.machines.part import MachinesPart
    from app.window.engine_setup import EngineSetup
    from app.window.help.dialogs import HelpDialogs
    from engine import EngineHost, HostEvent, Rig


class Parts(QObject):
    """The parts of the running application: services, window and presenters.

    What the first picture does not need comes after it (`start_up`), or when it is first wanted.

    Args:
        make_host: starts an engine that sends its events to the given callable.
        rig: simulated machine to plan for in place of this one; nothing can be loaded then.
    """

    def __init__(self, app: QApplication, make_host: MakeHost, rig: Rig | None = None) -> None:
        super().__init__(app)
        self._help: HelpDialogs | None = None
        self._machines: MachinesPart | None = None
        self.engine_setup: EngineSetup | None = None  # behind the first picture
        self._rig = rig
        imaginary = () if rig is None else ("plans",)  # splits over devices that nobody has
        self.settings = SettingsStore(paths.settings_file(), imaginary)
        current = self.settings.current
        start_language(app, current.language)
        apply_theme(app, current.theme, current.zoom)
        self.split_panel, self.monitor = SplitPanel(), MonitorPanel()
        self.remote = RemotePart(
            make_host, lambda: self.engine_setup is not None and self.engine_setup.is_missing,
            self.settings, self.keep, self.monitor, self._make_team, self,
        )  # fmt: skip
        self.client = EngineClient(self.remote.make_host, self)
        self.start_up = StartUp(rig, self)
        self.split = SplitSession(machine_factory=self.start_up.machine, parent=self)
        self._monitor_head = MonitorHead()
        self.split_presenter = SplitPresenter(self.split, self.split_panel, self)
        self.serving = ServerSession(self.client, self.settings, self.keep, self)
        self.tools = ToolPart(self.monitor, self)
        self.side_panels = SidePanels(self.split, self.client, self.split_panel, self.serving, self)
        self.split_panel.footer.add_button(self.side_panels.find)
        self.window = MainWindow(self._panels())
        self.keeper = SettingsKeeper(app, self.settings, self.window, self)
        self._make_services()
        self._make_presenters()

    def _panels(self) -> Panels:
        side = self.side_panels
        places = side.plans, side.map_place, side.links_place, side.server_place
        return Panels(self.split_panel, *places, self.monitor, self._monitor_head)

    def _make_services(self) -> None:
        self.tool_switch: ToolSwitch | None = None  # until there is a server of tools
        self.models = ModelSession(self.client, self._load_params, self, self.split.suggester)
        store = ChatStore(paths.chats_dir())
        self.session = ChatSession(
            ChatLibrary(store, self),
            self.client,
            sampling=lambda chat: self.sampling_presenter.params_for(chat),
            tools=self.tools.session,
            parent=self,
        )
        n_gib = self.settings.current.chat_cache_gib
        self.chat_cache = ChatCache(paths.chat_caches_dir(), self.client, n_gib * GIB, self)
        self.poller = DevicePoller(self)
        self.interpreter = Interpreter(self._is_idle, self)
        swept = paths.chat_caches_dir(), paths.settings_file().parent, paths.engines_dir()
        self.sweeper = Sweeper(swept, self)
        self.crashes = CrashReporter(self)

    def _make_presenters(self) -> None:
        window = self.window
        pages = ModelViews(window.model_bar, window.start_view)
        self.model_presenter = ModelPresenter(
            self.models, pages, self.split, self.settings, self.keep, self
        )
        self._make_chat()
        self._make_pages()
        self.tray = Tray(window, self.settings, self)
        self.taskbar = TaskbarProgress(lambda: painter_for(window), self)
        self.figures = AnswerFigures(
            self.client, self.session, self.monitor, self.split, self.side_panels, self.library,
            self,
        )  # fmt: skip
        self.open_on_send = OpenOnSend(
            self.client, self.models, self.session, window.composer, self.settings, self
        )
        # last, as its notice of a lost model has a button where those of others have none
        flush = self.chat_presenter.flush
        self.recovery = Recovery(self.client, self.models, self.session, flush, self)

    def _make_chat(self) -> None:
        """Make what shows and changes chats, and unloads the model while nobody writes."""
        window = self.window
        self.sampling_presenter = SamplingPresenter(
            window.sampling, self.session, self.client, self.settings, self.keep, self
        )
        self.sampling_presenter.summary_changed.connect(window.composer.set_sampling_summary)
        self.idle = IdleUnloader(
            self.client, self.models, window.composer,
            lambda: self.settings.current.unload_after_min, self,
        )  # fmt: skip
        views = ChatViews(window.chat_view, window.composer)
        self.chat_presenter = ChatPresenter(
            self.session, self.client, views, self.settings, self.keep,
            self.sampling_presenter.flush, self.idle.wake, self,
        )  # fmt: skip
        self.thinking = ThinkingSwitch(window.composer, self.session, self.client, self)
        self.tools.session.changed.connect(self._on_tools)
        self.chat_listing = ChatListing(
            self.session,
            self.client,
            self.chat_presenter,
            window.chat_list,
            ListPlaces(paths.chat_index_file(), paths.chat_folders_file()),
            lambda: self.settings.current.auto_titles,
            self,
        )
        self.running = RunningPresenter(
            self.session, self.client, self.chat_presenter, window.running, self
        )

    def _make_pages(self) -> None:
        """Make what is shown in the middle of the window in place of the chat, and the monitor."""
        window = self.window
        self.library = LibraryPage(
            self.split,
            self.settings,
            self.keep,
            partial(window.show_page, "models"),
            self._show_chat,
            self,
        )
        self.downloads = DownloadsPart(
            self.library.situation, self.settings, self.keep, self._is_idle, self
        )
        self.library.add(self.downloads)
        for page in (self.library, window.start_view):
            page.download_requested.connect(partial(self.library.show_part, self.downloads))
        self.monitor_presenter = MonitorPresenter(
            self.monitor, self._monitor_head, self.settings, self.keep, self
        )
        self.updates = UpdatePresenter(
            window, self.settings, self.keep, lambda: window.banner.notice is None, self
        )
        self.settings_page = SettingsPage(
            self.settings, self.keep, partial(window.show_page, "settings"), self._show_chat,
            lambda: Tray.problems() | self.updates.problems(), self,
        )  # fmt: skip
        self.tools.add_to(self.settings_page)

    # made when they are first wanted

    @property
    def machines(self) -> MachinesPart:
        """The part of other machines."""
        if self._machines is None:
            from app.remote.machines.part import (
                MachinesPart,  # late: few people have several machines
            )

            found = self._machines = MachinesPart(
                lambda: self.models.info.path if self.models.info else "", self.monitor, self
            )
            self.start_up.others = lambda: (found.team.devices, found.wires)
            self.poller.others = lambda: found.team.states
            found.changed.connect(self.start_up.look_again)
            found.completed.connect(self.remote.meet_team)
        return self._machines

    def _make_team(self, on_event: Callable[[HostEvent], None], first: int) -> EngineHost:
        return self.machines.make_host(on_event, first)

    @property
    def help(self) -> HelpDialogs:
        """The dialogs of help."""
        if self._help is None:
            from app.window.help.dialogs import HelpDialogs

            self._help = HelpDialogs(
                self.window, paths.log_file(), self.settings, lambda: self.start_up.devices,
                lambda: [chat.title for chat in self.session.library.summaries], self,
            )  # fmt: skip
            self._help.check_requested.connect(self.updates.check)
            self._help.news_requested.connect(self.updates.show_news)
            self._help.about_made.connect(self.updates.tell)
            self.updates.told.connect(self._help.show_update)
        return self._help

    @Slot()
    def _on_tools(self) -> None:
        """Let a person choose the tools of each chat, once there are any."""
        if self.tool_switch is None:
            from app.chat.switches import ToolSwitch

            source = self.tools.session
            self.tool_switch = ToolSwitch(self.window.composer, self.session, source, self)
        self.session.tools_changed.emit()

    def _make_engine_setup(self) -> EngineSetup:
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
        return setup

    # what parts ask for

    def keep(self, settings: Settings) -> None:
        """Use other settings, and have them written."""
        self.keeper.keep(settings)

    def _show_chat(self) -> None:
        self.window.show_chat(not self.session.current.is_empty)
        self.window.composer.setFocus()

    def _load_params(self) -> LoadParams:
        """Return how to load the selected model.

        Raises:
            EngineError: nothing can be loaded: the machine is simulated, or has no device.
        """
        if self._rig is not None:
            raise EngineError(engine.SIMULATED)
        return self.split.load_params()

    def _is_idle(self) -> bool:
        return self.client.state not in (EngineState.GENERATING, EngineState.LOADING)
