"""The window's settings: theme, zoom, language, docks; applied immediately, saved with a delay."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QLibraryInfo,
    QLocale,
    QObject,
    QSize,
    Qt,
    QTimer,
    QTranslator,
    Signal,
    Slot,
)
from PySide6.QtWidgets import QApplication, QDockWidget

from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import ENGLISH, languages, tr, use_language
from app.widgets.theme import apply_theme, px
from app.window.main_window import MONITOR_HEIGHT, SIDEBAR_WIDTH, SPLIT_WIDTH, MainWindow

_QT_TEXTS = "qtbase_{code}"


def chosen_language(setting: str) -> str:
    """Return the code for a language setting; "system" gives the first that the desktop lists."""
    spoken = languages()
    wanted = QLocale.system().uiLanguages() if setting == "system" else [setting]
    codes = (name.partition("-")[0] for name in wanted)
    return next((code for code in codes if code in spoken), ENGLISH)


def start_language(app: QCoreApplication, setting: str) -> None:
    """Translate the app's texts and Qt's own; texts already on screen keep their language."""
    code = chosen_language(setting)
    use_language(code)
    desktop = QLocale.system()
    # number formats: keep the desktop's if it has the same language
    QLocale.setDefault(desktop if desktop.name().startswith(code) else QLocale(code))
    for old in app.findChildren(QTranslator):
        app.removeTranslator(old)
        old.deleteLater()
    translator = QTranslator(app)
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    if code != ENGLISH and translator.load(_QT_TEXTS.format(code=code), folder):
        app.installTranslator(translator)


STEPS: Final = (70, 80, 90, 100, 110, 125, 150, 175, 200)
"""Zoom steps for keys and wheel, in percent; the settings page allows other values."""


def next_zoom(percent: int, direction: int) -> int:
    """Return the next zoom: larger for direction 1, smaller for -1, 100 % for 0."""
    if direction > 0:
        return next((step for step in STEPS if step > percent), STEPS[-1])
    if direction < 0:
        return next((step for step in reversed(STEPS) if step < percent), STEPS[0])
    return 100


def room_on_screen(window: MainWindow) -> QSize:
    """Return the size available on the window's screen."""
    return window.screen().availableSize()


class DockFit(QObject):
    """Hides panels if the window is too narrow: first those on the right, then the chat list.

    They return when there is room for them.
    """

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._hidden: list[QDockWidget] = []
        self._wanted = 0  # window width at which some of these fit again
        self._resized = QTimer(self, singleShot=True, interval=0)
        self._resized.timeout.connect(self._on_resized)
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.Resize:
            self._resized.start()
        return super().eventFilter(watched, event)

    @Slot()
    def _on_resized(self) -> None:
        width, needed = self._window.width(), self._window.minimumSizeHint().width()
        if needed > width or (self._hidden and width >= self._wanted):
            had_hidden = bool(self._hidden)
            self._hide_for(width)
            if had_hidden and not self._hidden:
                self._widen()

    @Slot()
    def fit_screen(self) -> None:
        """Hide panels for which the screen is too small."""
        window, room = self._window, room_on_screen(self._window)
        needed = window.minimumSizeHint().width()
        if needed > room.width():
            self.fit(window.size().boundedTo(room))
        elif needed > window.width():
            window.resize(needed, window.height())

    @Slot(object)
    def make_way(self, opened: QDockWidget) -> None:
        """Widen the window for an opened panel, or hide the panels on the other side."""
        window, room, size = self._window, room_on_screen(self._window), self._window.size()
        self._hidden = [dock for dock in self._hidden if dock is not opened]
        QApplication.sendPostedEvents()  # lay out the panel
        needed = window.minimumSizeHint().width()
        if needed <= size.width():
            return
        if needed <= room.width() and not window.isMaximized():
            window.resize(needed, size.height())
            return
        for dock in window.right_docks if opened is window.chats_dock else (window.chats_dock,):
            dock.hide()
        QApplication.sendPostedEvents()
        if not window.isMaximized():
            window.resize(size.boundedTo(room))

    def fit(self, size: QSize) -> None:
        """Reset the panel layout for a window of this size."""
        window = self._window
        self._hide_for(size.width())
        if not window.isMaximized():
            window.resize(size)
        docks, widths = zip(*self._usual_widths(), strict=True)
        window.resizeDocks(docks, widths, Qt.Orientation.Horizontal)
        height = min(px(MONITOR_HEIGHT), size.height() // 3)
        window.resizeDocks([window.monitor_dock], [height], Qt.Orientation.Vertical)

    def _usual_widths(self) -> list[tuple[QDockWidget, int]]:
        right = [(dock, px(SPLIT_WIDTH)) for dock in self._window.right_docks]
        return [(self._window.chats_dock, px(SIDEBAR_WIDTH)), *right]

    def _widen(self) -> None:
        shown = [(dock, width) for dock, width in self._usual_widths() if not dock.isHidden()]
        for dock, width in shown:
            if dock.width() < width:
                self._window.resizeDocks([dock], [width], Qt.Orientation.Horizontal)

    def _hide_for(self, width: int) -> None:
        window = self._window
        docks = [window.chats_dock, *window.right_docks]
        shown = [dock for dock in docks if not dock.isHidden() or dock in self._hidden]
        right = [dock for dock in shown if dock is not window.chats_dock]
        wanted = []
        for self._hidden in ([], right, shown):
            for dock in shown:
                dock.setVisible(dock not in self._hidden)
            QApplication.sendPostedEvents()  # lay out the panels
            needed = window.minimumSizeHint().width()
            if needed <= width:
                break
            wanted.append(needed)
        self._wanted = min(wanted, default=0)


SAVE_MS = 500


class SettingsKeeper(QObject):
    """Applies and saves changed settings."""

    kept = Signal()  # after any change
    noticed = Signal(object)  # Notice

    def __init__(
        self, app: QApplication, store: SettingsStore, window: MainWindow, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._app, self._store, self._window = app, store, window
        self.dock_fit = DockFit(window)
        window.panel_opened.connect(self.dock_fit.make_way)
        self._is_closed = self._is_loss_known = False
        self._timer = QTimer(self, singleShot=True, interval=SAVE_MS)
        self._timer.timeout.connect(self._save)
        self._job = LatestJob("tandem-settings", self)
        self._job.done.connect(self._on_saved)

    def keep(self, settings: Settings) -> None:
        """Apply settings, and schedule saving."""
        is_zoomed, size = settings.zoom != self._store.current.zoom, self._window.size()
        self._store.put(settings)
        apply_theme(self._app, settings.theme, settings.zoom)
        if is_zoomed:
            self.dock_fit.fit(size)
        self.kept.emit()
        if not self._is_closed:
            self._timer.start()

    @Slot(int)
    def zoom(self, direction: int) -> None:
        """Zoom in (1), out (-1) or reset (0)."""
        current = self._store.current
        self.keep(replace(current, zoom=next_zoom(current.zoom, direction)))

    def close(self) -> None:
        """Save the settings and stop the timer."""
        self._is_closed = True
        self._timer.stop()
        self._job.close()
        self._store.save()

    @Slot()
    def _save(self) -> None:
        self._job.run(self._store.save)

    @Slot(object)
    def _on_saved(self, is_saved: bool) -> None:
        if not is_saved and not self._is_loss_known:
            self._is_loss_known = True
            what = tr("The settings cannot be saved ({why}).").format(why=self._store.problem)
            self.noticed.emit(
                Notice(what, tr("They are kept in memory until the window closes."), "warning")
            )
