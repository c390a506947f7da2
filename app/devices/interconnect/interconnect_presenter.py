"""Reads and measures links on threads, for the Links panel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.core.background import LatestJob
from app.core.translation import error_text, tr
from app.devices.interconnect.interconnect import InterconnectPicture, read_links
from app.devices.interconnect.measuring import measure_apart
from app.devices.interconnect.views.interconnect_panel import InterconnectPanel
from app.devices.split.figures import rank_labels
from engine import DeviceInfo, EngineError

if TYPE_CHECKING:
    from engine import Rig, Wires

Reader = Callable[[Sequence[DeviceInfo], "Rig | None", "Wires | None"], InterconnectPicture]
Meter = Callable[[Sequence[DeviceInfo], Callable[[str], None], Callable[[], bool]], None]


class InterconnectPresenter(QObject):
    """Reads the links whenever the panel is shown, and measures on request."""

    measured = Signal()  # predictions must be updated

    _said = Signal(str)

    def __init__(
        self,
        panel: InterconnectPanel,
        parent: QObject | None = None,
        *,
        read: Reader = read_links,
        measure: Meter = measure_apart,
    ) -> None:
        super().__init__(parent)
        self._panel, self._read, self._measure = panel, read, measure
        self.lacks_engine = False  # measuring needs an engine
        self._devices: tuple[DeviceInfo, ...] = ()
        self._rig: Rig | None = None
        self._wires: Wires | None = None
        self._stop = threading.Event()
        self._reader = LatestJob("tandem-links", self)
        self._meter = LatestJob("tandem-measure", self)
        self._reader.done.connect(self._show)
        self._meter.done.connect(self._on_measured)
        self._meter.failed.connect(self._on_failed)
        self._said.connect(panel.set_status)
        panel.shown.connect(self.refresh)
        panel.measure_requested.connect(self.measure)
        panel.stop_requested.connect(self._stop.set)

    def set_devices(
        self, devices: Sequence[DeviceInfo], rig: Rig | None = None, wires: Wires | None = None
    ) -> None:
        """Show these devices, or the simulated `rig` if given; `wires` lead to other machines."""
        self._devices, self._rig, self._wires = tuple(devices), rig, wires
        if self._panel.isVisible():
            self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Read the links again, because slot states change with load."""
        devices, rig, wires = self._devices, self._rig, self._wires
        self._reader.run(lambda: self._read(devices, rig, wires))

    @Slot()
    def measure(self) -> None:
        """Measure devices and links, unless already measuring or the devices are simulated."""
        if self._meter.is_busy or self._rig is not None:
            return
        if self.lacks_engine:
            self._panel.set_status(tr("Measuring requires an engine."), is_error=True)
            return
        self._stop.clear()
        self._panel.set_measuring(True)
        devices = self._devices
        self._meter.run(lambda: self._measure(devices, self._said.emit, self._stop.is_set))

    def close(self) -> None:
        """Stop measuring and wait for the threads."""
        self._stop.set()
        self._reader.close()
        self._meter.close()

    @Slot(object)
    def _show(self, picture: InterconnectPicture) -> None:
        ids = [device.id for device in self._devices]
        named = zip(ids, rank_labels(ids), strict=True)
        labels = ["CPU" if device == "cpu" else name for device, name in named]
        self._panel.show_picture(picture, ids, labels, is_simulated=self._rig is not None)

    @Slot(object)
    def _on_measured(self, _: object) -> None:
        self._panel.set_measuring(False)
        self.refresh()
        self.measured.emit()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._panel.set_measuring(False)
        self._panel.set_status(error_text(error), is_error=True)
