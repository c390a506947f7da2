"""Actions of tests on a split panel, and readings from it."""

from __future__ import annotations

from typing import ClassVar

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QCloseEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QWidget

from app.devices.split.planning import PlannerFactory
from app.devices.split.session import SplitSession
from app.devices.split.speed import MachineFactory, this_machine
from app.devices.split.views.split_bar import ShareHandle
from app.devices.split.views.split_panel import SplitPanel
from engine import (
    DeviceMemory,
    DeviceSnapshot,
    Finished,
    LoadParams,
    MemoryUse,
    ModelLoaded,
    Planner,
    Timings,
    Usage,
)
from tests.helpers.fake_planner import GIB, INFO, FakePlanner


class WiredPanel(SplitPanel):
    """Split panel with its own session.

    It lives until it is closed: pytest-qt, which closes it, keeps only a weak reference.
    """

    _open: ClassVar[set[WiredPanel]] = set()

    def __init__(
        self,
        planner_factory: PlannerFactory = Planner,
        machine_factory: MachineFactory = this_machine,
    ) -> None:
        self.session = SplitSession(planner_factory, machine_factory)
        super().__init__(self.session)
        self.session.setParent(self)
        self._open.add(self)

    def closeEvent(self, event: QCloseEvent) -> None:
        self.session.stop()
        self._open.discard(self)
        super().closeEvent(event)


def settle() -> None:
    """Process events until the panel has planned and shown the result."""
    for _ in range(3):
        QApplication.processEvents()


def texts(panel: QWidget) -> str:
    """Return the texts of all labels."""
    return "\n".join(w.text() for w in panel.findChildren(QLabel) if w.isVisible())


def loaded_as(params: LoadParams) -> ModelLoaded:
    """Return the event of a model that was loaded with 1 % less memory than predicted."""
    plan = FakePlanner(params.path).evaluate(params).plan
    memory = tuple(
        DeviceMemory(d.device, d.memory, MemoryUse(d.memory.total * 100 // 101))
        for d in plan.devices
    )
    return ModelLoaded(INFO, params, plan.n_ctx, memory, 1.0)


def answered(rate: float, n_prompt: int = 100, n_tokens: int = 50) -> Finished:
    """Return the end of an answer at `rate` tokens per second."""
    timings = Timings(0.1, 1.0, 0.2, 200.0, rate)
    return Finished("stop", Usage(n_prompt, 0, n_tokens), timings)


def used(device: str, gib: float, total: int = 24) -> DeviceSnapshot:
    """Return a snapshot of a device of which some memory is in use."""
    n_used = int(gib * GIB)
    return DeviceSnapshot(device, 0.0, n_used, total * GIB, total * GIB - n_used)


def press(handle: ShareHandle) -> None:
    QTest.mousePress(handle, Qt.MouseButton.LeftButton, pos=handle.rect().center())


def move(panel: SplitPanel, handle: ShareHandle, position: float) -> None:
    """Move the mouse to a position of the bar, 0 to 1."""
    bar = panel.header.bar
    target = QPoint(round(bar.width() * position), handle.geometry().center().y())
    QTest.mouseMove(handle, handle.mapFromParent(target))


def release(handle: ShareHandle) -> None:
    QTest.mouseRelease(handle, Qt.MouseButton.LeftButton)


def drag(panel: SplitPanel, handle: ShareHandle, position: float) -> None:
    press(handle)
    move(panel, handle, position)
    release(handle)
    settle()


def painted_position(panel: SplitPanel, handle: ShareHandle) -> float:
    """Return the position at which a handle is painted, 0 to 1."""
    return handle.geometry().center().x() / panel.header.bar.width()
