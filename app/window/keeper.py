"""Uses changed settings at once, and has them written a moment later."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QObject, QTimer, Signal, Slot
from PySide6.QtWidgets import QApplication

from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.widgets.theme import apply_theme
from app.window.appearance import next_zoom
from app.window.dock_fit import DockFit
from app.window.main_window import MainWindow

SAVE_MS = 500


class SettingsKeeper(QObject):
    """What gives changed settings their effect on the window, until `close`.

    Signals: `kept` after a change, whoever has made it.

    Attributes:
        dock_fit: what hides panels without room.
    """

    kept = Signal()
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
        """Use other settings; a timer writes them."""
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
        """Make everything larger (1), smaller (-1) or of normal size (0)."""
        current = self._store.current
        self.keep(replace(current, zoom=next_zoom(current.zoom, direction)))

    def close(self) -> None:
        """Write the settings now, and no more by a timer."""
        self._is_closed = True
        self._timer.stop()
        self._job.close()
        self._store.save()

    @Slot()
    def _save(self) -> None:
        """Write the settings on a thread, as a disk may be slow."""
        self._job.run(self._store.save)

    @Slot(object)
    def _on_saved(self, is_saved: bool) -> None:
        """Say so the first time that writing has failed."""
        if not is_saved and not self._is_loss_known:
            self._is_loss_known = True
            what = tr("The settings cannot be saved ({why}).").format(why=self._store.problem)
            self.noticed.emit(Notice(what, tr("They are kept until the window closes."), "warning"))
