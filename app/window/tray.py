"""The icon in the desktop's tray, and the desktop's messages; both only by choice."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QMenu, QSystemTrayIcon

from app.chat.session import ChatSession
from app.core.engine_client import EngineClient, RunningAnswer
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

NAMES = ("tray", "notifications")
"""Settings that need a tray."""


class Tray(QObject):
    """What the desktop shows of the window while others are in front of it.

    The desktop shows messages for an icon, so there is one as soon as messages are wanted.
    """

    new_chat_requested = Signal()

    def __init__(self, window: MainWindow, settings: SettingsStore, parent: QObject) -> None:
        super().__init__(parent)
        self._window, self._settings = window, settings
        self.icon: TrayIcon | None = None
        self._menu: QMenu | None = None
        theme_signals().changed.connect(self._show_icon)

    @staticmethod
    def problems() -> dict[str, str]:
        """Return why settings have no effect here, by name."""
        if TrayIcon.isSystemTrayAvailable():
            return {}
        return dict.fromkeys(NAMES, tr("This desktop has no tray, so this has no effect."))

    @Slot()
    def apply(self) -> None:
        """Show or hide the icon as the settings say."""
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
        """Say that an answer is finished, if nobody sees that."""
        self._say(tr("The answer is finished."))

    @Slot(object)
    def note(self, notice: Notice) -> None:
        """Say news, if nobody sees them in the window."""
        if notice.is_news:
            self._say(notice.text)

    def close(self) -> None:
        """Take the icon away."""
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
    """The way of the figures of answers; the monitor shows the speed of all together."""

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
        """Note the speed of an answer; one that shared the model is slower than the model is."""
        if not answer.was_alone:
            return
        self._monitor.note_guesses(finished)
        rate, model = finished.timings.decode_per_s, self._client.model
        is_here = model is not None and not is_remote(model.info.path)
        if is_here:
            self._split.note_answer(finished)
            self._side_panels.note_answer(finished, model)
            if (plain := finished.plain_per_s) > 0:
                self._library.note_speed(model, plain)
        if rate > 0:
            self._monitor.add_rate(rate)  # a short answer ends before the first reading of it
            self._monitor.add_rate(0.0)
