"""Saves the monitor's view to the settings and to files; polls the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import reason_of, tr
from app.devices.monitor.views.monitor_panel import MonitorHead, MonitorPanel, graph_names
from app.widgets.text import ask_where_to_save
from engine import EngineError

if TYPE_CHECKING:
    from engine import DeviceSnapshot


class MonitorPresenter(QObject):
    """Connects the monitor to its buttons and to the settings, which `keep` saves."""

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        panel: MonitorPanel,
        head: MonitorHead,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._panel, self._head = panel, head
        self._settings, self._keep = settings, keep
        self._job = LatestJob("tandem-monitor-file", self)
        self._job.failed.connect(lambda error: self.noticed.emit(Notice.of(error)))
        self._job.done.connect(self._on_saved)
        head.chosen.connect(self._on_chosen)
        head.export_requested.connect(self._ask)
        current = settings.current
        self._show(current.monitor_overview, current.monitor_graphs)

    def close(self) -> None:
        """Wait until any file being written is complete."""
        self._job.close()

    def save(self, path: Path) -> None:
        """Write the view to a file on a thread: an image for ".png", otherwise a table."""
        if path.suffix.lower() == ".png":
            image = self._panel.grab().toImage()
            self._job.run(lambda: _written(path, lambda: image.save(str(path))))
        else:
            rows = self._panel.table()
            self._job.run(lambda: _written(path, lambda: path.write_bytes(_csv(rows))))

    def _show(self, is_overview: bool, graphs: Sequence[str]) -> None:
        known = [name for name in graph_names() if name in graphs] or list(graph_names()[:3])
        self._panel.choose(is_overview, known)
        self._head.show_choice(is_overview, known)

    @Slot(bool, object)
    def _on_chosen(self, is_overview: bool, graphs: tuple[str, ...]) -> None:
        self._show(is_overview, graphs)
        current = self._settings.current
        self._keep(replace(current, monitor_overview=is_overview, monitor_graphs=graphs))

    @Slot(str)
    def _ask(self, suffix: str) -> None:
        kind = tr("Table (*.csv)") if suffix == ".csv" else tr("Image (*.png)")
        title, name = tr("Save this view"), f"tandem-monitor{suffix}"
        chosen, _ = ask_where_to_save(self._panel, title, name, kind)
        if chosen:
            path = Path(chosen)
            self.save(path if path.suffix.lower() == suffix else Path(f"{path}{suffix}"))

    @Slot(object)
    def _on_saved(self, path: Path) -> None:
        self.noticed.emit(Notice(tr("Saved as {name}.").format(name=path.name)))


def _written(path: Path, write: Callable[[], object]) -> Path:
    try:
        is_done = write()
    except OSError as error:
        why = reason_of(error)
        raise EngineError(
            tr("{name} cannot be written ({why}).").format(name=path.name, why=why),
            tr("Choose another folder."),
        ) from error
    if is_done is False:
        raise EngineError(
            tr("{name} cannot be written.").format(name=path.name), tr("Choose another folder.")
        )
    return path


def _csv(rows: Sequence[Sequence[str]]) -> bytes:
    import csv  # imported here because it is rarely used
    import io

    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8")


BUSY_S, IDLE_S = 1.0, 2.0
"""Seconds between readings while the engine is busy or idle; an idle window's CPU load is mostly
due to readings."""


class DevicePoller(QObject):
    """Emits regular snapshots of all devices, read on a thread because drivers can be slow.

    Args:
        interval_s: seconds between readings while the engine is busy.

    Attributes:
        others: returns snapshots of other machines' devices; called on the thread.
    """

    snapshots = Signal(object)  # list[DeviceSnapshot]

    def __init__(self, parent: QObject | None = None, interval_s: float = BUSY_S) -> None:
        super().__init__(parent)
        self._busy_s = interval_s
        self._is_busy = False
        self.others: Callable[[], list[DeviceSnapshot]] = list
        self._monitor: engine.DeviceMonitor | None = None

    @property
    def is_running(self) -> bool:
        return self._monitor is not None

    def start(self) -> None:
        """Start polling unless it is already running."""
        if self._monitor is None:
            self._monitor = engine.DeviceMonitor()
            self._monitor.start(
                lambda local: self.snapshots.emit([*local, *self.others()]), self._interval()
            )

    def set_busy(self, busy: bool) -> None:
        """Use the polling interval for a busy or an idle engine."""
        self._is_busy = busy
        if self._monitor is not None:
            self._monitor.pace(self._interval())

    def _interval(self) -> float:
        return self._busy_s if self._is_busy else self._busy_s * IDLE_S / BUSY_S

    def stop(self) -> None:
        """Stop the thread and release the driver."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
