"""What the window's first picture does not need and therefore comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.process.late_imports import import_host, import_planner
from app.devices.split.speed import MachineFacts, simulated_machine, this_machine
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.setup.engine_pack.activation import Origin
    from engine import Rig, Wires

UNSEEN_MS = 300
"""Milliseconds after which a window that is not painted, as a minimised one, goes on starting."""

Found = tuple[Sequence[DeviceInfo], MachineFacts]
"""Devices, and what is known about them."""


class StartUp(QObject):
    """The start after the first picture: imports on a thread, the engine, then the devices.

    Args:
        rig: simulated machine to plan for in place of this one.

    Attributes:
        is_ready: whether the devices are known, so that models can be opened.
        devices: the devices of the machine; empty until they are known.
        others: returns devices of other machines, and the links to them.
    """

    host_imported = Signal(str)  # Origin of the engine
    devices_found = Signal(object, object)  # Sequence[DeviceInfo], MachineFacts

    def __init__(self, rig: Rig | None, parent: QObject) -> None:
        super().__init__(parent)
        self._rig = rig
        self._has_begun = self.is_ready = self._is_told_again = False
        self._origin: Origin = "own"
        self.devices: tuple[DeviceInfo, ...] = ()
        self.others: Callable[[], tuple[Sequence[DeviceInfo], Wires | None]] = lambda: ((), None)
        self._unseen_timer = QTimer(self, singleShot=True, interval=UNSEEN_MS)
        self._unseen_timer.timeout.connect(self.begin)
        self._imports = LatestJob("tandem-imports", self)
        self._imports.done.connect(self._on_imported)
        self._search = LatestJob("tandem-devices", self)
        self._search.done.connect(self._on_found)

    def arm(self) -> None:
        """Begin soon, even if no picture comes."""
        self._unseen_timer.start()

    @Slot()
    def begin(self) -> None:
        """Begin, unless that has happened or the window is closed."""
        self._unseen_timer.stop()
        if not self._has_begun:
            self._has_begun = True
            self._imports.run(_import_first)

    def close(self) -> None:
        """Start nothing more, and wait for what runs."""
        self._has_begun = True
        self._unseen_timer.stop()
        self._imports.close()
        self._search.close()

    def search_again(self, origin: Origin) -> None:
        """Tell the devices anew, even if they are the same: another engine may use others.

        Args:
            origin: where the engine comes from now.
        """
        self._origin, self._is_told_again = origin, True
        self._search.run(lambda: self._find(wait=True))

    @Slot()
    def look_again(self) -> None:
        """Tell the devices anew: those of other machines have come or gone."""
        self._is_told_again = True
        self._search.run(lambda: self._find(wait=False))

    @property
    def is_searching(self) -> bool:
        return self._search.is_busy

    def machine(self, devices: Sequence[DeviceInfo]) -> MachineFacts:
        """Return what is known about devices; files are read, so a thread should call this."""
        if self._rig is not None:
            return simulated_machine(self._rig)
        return this_machine(devices, self.others()[1])

    def _find(self, *, wait: bool) -> Found:
        """Return the devices and the facts about them; work for a thread.

        Args:
            wait: whether to wait for torch, which may know of more.
        """
        import_planner()
        rig = self._rig
        if rig is not None:
            devices = rig.list_devices()
        else:
            from app.setup.page.texts import without_commands

            found = engine.list_devices(wait=wait)
            devices = [without_commands(device, self._origin) for device in found]
            devices += self.others()[0]
        return devices, self.machine(devices)

    @Slot(object)
    def _on_imported(self, origin: Origin) -> None:
        self._origin = origin
        self.host_imported.emit(origin)
        self._search.run(lambda: self._find(wait=False))

    @Slot(object)
    def _on_found(self, found: Found) -> None:
        """Tell the first devices, or others that were found since."""
        devices, machine = found
        is_same = self.is_ready and [d.id for d in devices] == [d.id for d in self.devices]
        if is_same and not self._is_told_again:
            return
        self._is_told_again = False
        is_first, self.is_ready = not self.is_ready, True
        self.devices = tuple(devices)
        self.devices_found.emit(devices, machine)
        # GPUs that only torch may know, where no driver told any at once
        if is_first and self._rig is None and not any(d.kind == "cuda" for d in devices):
            self._search.run(lambda: self._find(wait=True))


def _import_first() -> Origin:
    """Import what starts the engine, and find out where that is; work for a thread."""
    from app.setup.engine_pack.activation import activate

    origin = activate()  # first, as later child processes import from there
    import_host()
    return origin
