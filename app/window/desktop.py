"""Desktop integration: taskbar progress, tray icon, notifications."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtDBus import QDBusConnection, QDBusMessage
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QMenu, QSystemTrayIcon, QWidget

from app.chat.session import ChatSession
from app.core.engine_client import EngineClient, EngineState, RunningAnswer
from app.core.notice import Notice
from app.core.settings import SettingsStore
from app.core.translation import tr
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.devices.split.session import SplitSession
from app.models.library.page import LibraryPage
from app.remote.client.address import is_remote
from app.widgets.text import TrayIcon, set_tip
from app.widgets.theme import icon, theme, theme_signals
from app.window.main_window import MainWindow
from app.window.side_panels import SidePanels
from engine import Finished

Painter = Callable[[float | None], None]
"""Function that shows progress from 0 to 1 in the taskbar; None hides it."""

STEPS: Final = 100
"""Number of steps in the progress bar."""


class TaskbarProgress(QObject):
    """Taskbar progress of the model load or, if nothing is loading, of the downloads.

    Args:
        make_painter: called on first use.
    """

    def __init__(self, make_painter: Callable[[], Painter], parent: QObject) -> None:
        super().__init__(parent)
        self._make_painter = make_painter
        self._painter: Painter | None = None
        self._load: float | None = None
        self._downloads: float | None = None
        self._shown: int | None = None
        self._is_loading = False

    @Slot(object)
    def note_state(self, state: EngineState) -> None:
        """Handle a change of the engine's state."""
        self._is_loading = state is EngineState.LOADING
        if not self._is_loading:
            self._load = None
            self._show()

    @Slot(float)
    def note_load(self, share: float) -> None:
        if self._is_loading:
            self._load = share
            self._show()

    @Slot(object)
    def note_downloads(self, share: float | None) -> None:
        """Show the downloads' total progress; None if there are no downloads."""
        self._downloads = share
        self._show()

    @Slot()
    def close(self) -> None:
        """Hide the progress."""
        self._load = self._downloads = None
        self._show()

    def _show(self) -> None:
        share = self._downloads if self._load is None else self._load
        step = None if share is None else round(STEPS * min(1.0, max(0.0, share)))
        if step == self._shown:
            return
        self._shown = step
        if self._painter is None:
            self._painter = self._make_painter()
        self._painter(None if step is None else step / STEPS)


def painter_for(window: QWidget) -> Painter:
    """Return a painter for this desktop; it does nothing on unsupported ones."""
    if sys.platform == "win32":
        return windows_painter(int(window.winId()))
    if sys.platform == "darwin" or not _has_session_bus():
        return lambda share: None
    return unity_painter()


def _has_session_bus() -> bool:
    # check the address, as connecting would start a bus
    if os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return True
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return bool(folder) and Path(str(folder), "bus").exists()


INTERFACE = "com.canonical.Unity.LauncherEntry"
PATH = "/com/canonical/unity/launcherentry/tandem"


def unity_painter() -> Painter:
    """Return a painter that emits Unity's D-Bus signal."""
    bus = QDBusConnection.sessionBus()
    entry = f"application://{QGuiApplication.desktopFileName()}.desktop"

    def paint(share: float | None) -> None:
        if not bus.isConnected():
            return
        message = QDBusMessage.createSignal(PATH, INTERFACE, "Update")
        shown = {"progress": float(share or 0.0), "progress-visible": share is not None}
        message.setArguments([entry, shown])
        bus.send(message)

    return paint


log = logging.getLogger(__name__)

TASKBAR_LIST: Final = uuid.UUID("56fdf344-fd6d-11d0-958a-006097c9a090")
TASKBAR_LIST_3: Final = uuid.UUID("ea1afb91-9e28-4b86-90e9-5e9f8a5eefaf")
IN_THIS_PROCESS: Final = 1  # CLSCTX_INPROC_SERVER
INIT, SET_VALUE, SET_STATE = 3, 9, 10
"""Method indices in the vtable, which starts with the three methods of `IUnknown`."""

NO_PROGRESS: Final = 0  # TBPF_NOPROGRESS; setting a value leaves this state


def windows_painter(window: int) -> Painter:
    """Return a painter for a window's taskbar button, given the window handle."""
    interface = ctypes.c_void_p()
    ole32 = ctypes.WinDLL("ole32")  # type: ignore[attr-defined,unused-ignore]
    ole32.CoInitialize(None)  # Qt did so on this thread; repeating it is harmless
    status = ole32.CoCreateInstance(
        TASKBAR_LIST.bytes_le, None, IN_THIS_PROCESS, TASKBAR_LIST_3.bytes_le,
        ctypes.byref(interface),
    )  # fmt: skip
    if status < 0 or not interface.value:
        log.info("the taskbar shows no progress: status %#x", status & 0xFFFFFFFF)
        return lambda share: None
    return interface_painter(interface.value, window, ctypes.WINFUNCTYPE)  # type: ignore[attr-defined,unused-ignore]


def interface_painter(interface: int, window: int, function_type: Callable[..., Any]) -> Painter:
    """Return a painter that calls the `ITaskbarList3` at an address.

    Args:
        function_type: factory for function types with the interface's calling convention.
    """
    table = ctypes.cast(interface, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents

    def method(place: int, *types: object) -> Callable[..., int]:
        made = function_type(ctypes.c_long, ctypes.c_void_p, *types)
        return made(table[place])  # type: ignore[no-any-return]

    set_value = method(SET_VALUE, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong)
    set_state = method(SET_STATE, ctypes.c_void_p, ctypes.c_int)
    method(INIT)(interface)

    def paint(share: float | None) -> None:
        if share is None:
            set_state(interface, window, NO_PROGRESS)
        else:
            set_value(interface, window, round(STEPS * share), STEPS)

    return paint


NAMES = ("tray", "notifications")
"""Settings that require a tray."""


class Tray(QObject):
    """The tray icon, and notifications, which need the icon."""

    new_chat_requested = Signal()

    def __init__(self, window: MainWindow, settings: SettingsStore, parent: QObject) -> None:
        super().__init__(parent)
        self._window, self._settings = window, settings
        self.icon: TrayIcon | None = None
        self._menu: QMenu | None = None
        theme_signals().changed.connect(self._show_icon)

    @staticmethod
    def problems() -> dict[str, str]:
        """Return the reasons why settings have no effect, by setting name."""
        if TrayIcon.isSystemTrayAvailable():
            return {}
        return dict.fromkeys(NAMES, tr("Has no effect because this desktop has no tray."))

    @Slot()
    def apply(self) -> None:
        """Show or hide the icon according to the settings."""
        current = self._settings.current
        is_wanted = (current.tray or current.notifications) and not self.problems()
        if is_wanted and self.icon is None:
            self.icon = TrayIcon(self)
            self.icon.setContextMenu(self._make_menu())
            self.icon.activated.connect(self._on_activated)
            self._show_icon()
            self.icon.show()
        elif not is_wanted:
            self.close()

    @Slot()
    def note_answer(self) -> None:
        """Notify the user of a finished answer, unless the window is active."""
        self._say(tr("The answer is finished."))

    @Slot(object)
    def note(self, notice: Notice) -> None:
        """Show news as a notification, unless the window is active."""
        if notice.is_news:
            self._say(notice.text)

    def close(self) -> None:
        """Remove the icon."""
        if self.icon is not None and self._menu is not None:
            self.icon.hide()
            self.icon.deleteLater()
            self._menu.deleteLater()
            self.icon = self._menu = None

    def _say(self, text: str) -> None:
        if self.icon is not None and self._settings.current.notifications and not self._is_seen():
            self.icon.say(text)

    def _is_seen(self) -> bool:
        return self._window.isActiveWindow() and not self._window.isMinimized()

    def _make_menu(self) -> QMenu:
        menu = self._menu = QMenu()
        menu.addAction(tr("Show the window")).triggered.connect(self._show_window)
        menu.addAction(tr("New chat")).triggered.connect(self._new_chat)
        menu.addSeparator()
        menu.addAction(tr("Quit")).triggered.connect(self._window.close)
        return menu

    @Slot()
    def _show_icon(self) -> None:
        if self.icon is not None:
            self.icon.setIcon(icon("split", theme().accent))
            set_tip(self.icon, "Tandem")

    @Slot(object)
    def _on_activated(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        if reason != QSystemTrayIcon.ActivationReason.Trigger:
            return
        if self._is_seen():
            self._window.showMinimized()
        else:
            self._show_window()

    @Slot()
    def _show_window(self) -> None:
        self._window.come_to_front("")

    @Slot()
    def _new_chat(self) -> None:
        self._show_window()
        self.new_chat_requested.emit()


class AnswerFigures(QObject):
    """Passes figures about answers to the monitor, split, plans and library."""

    def __init__(
        self,
        client: EngineClient,
        chats: ChatSession,
        monitor: MonitorPanel,
        split: SplitSession,
        side_panels: SidePanels,
        library: LibraryPage,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._monitor = client, monitor
        self._split, self._side_panels, self._library = split, side_panels, library
        chats.answering.connect(monitor.mark_message)
        client.rate.connect(monitor.add_rate)
        client.token_times.connect(monitor.add_times)
        client.finished.connect(self._on_finished)

    @Slot(object, object)
    def _on_finished(self, finished: Finished, answer: RunningAnswer) -> None:
        if not answer.was_alone:  # it shared the model, so its speed says little
            return
        self._monitor.note_drafts(finished)
        rate, model = finished.timings.decode_per_s, self._client.model
        is_here = model is not None and not is_remote(model.info.path)
        if is_here:
            self._split.note_answer(finished)
            self._side_panels.note_answer(finished, model)
            if (plain := finished.plain_per_s) > 0:
                self._library.note_speed(model, plain)
        if rate > 0:
            self._monitor.add_rate(rate)  # a short answer finishes before its first measurement
            self._monitor.add_rate(0.0)
