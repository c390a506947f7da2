"""Which progress the taskbar shows, and how."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QWidget

from app.core.engine_client import EngineState
from app.window.taskbar.painter import STEPS, Painter


class TaskbarProgress(QObject):
    """Progress of the load or else of the downloads, shown in the taskbar.

    Args:
        make_painter: called when there is something to show for the first time.
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
        """Take what the engine does; only loads have a progress."""
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
        """Take how far all downloads are together; None if there are none."""
        self._downloads = share
        self._show()

    @Slot()
    def close(self) -> None:
        """Take the progress away."""
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
    """Return what shows a progress on this desktop; where nothing does, it does nothing."""
    if sys.platform == "win32":
        from app.window.taskbar.windows import windows_painter

        return windows_painter(int(window.winId()))
    if sys.platform == "darwin" or not _has_session_bus():
        return lambda share: None
    from app.window.taskbar.unity import unity_painter

    return unity_painter()


def _has_session_bus() -> bool:
    """Return whether there is a D-Bus of the session, as asking for none would start one."""
    if os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return True
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return bool(folder) and Path(str(folder), "bus").exists()
