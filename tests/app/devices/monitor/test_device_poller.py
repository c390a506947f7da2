"""Snapshots cross from the monitor's thread to the GUI thread, and the thread ends."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QCoreApplication, QObject, QThread, Slot
from pytestqt.qtbot import QtBot

from app.devices.monitor.monitor_presenter import BUSY_S, IDLE_S, DevicePoller
from engine import DeviceSnapshot


class Receiver(QObject):
    def __init__(self) -> None:
        super().__init__()
        self.readings: list[list[DeviceSnapshot]] = []
        self.threads: set[QThread] = set()

    @Slot(object)
    def take(self, snapshots: list[DeviceSnapshot]) -> None:
        self.readings.append(snapshots)
        self.threads.add(QThread.currentThread())


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tandem-monitor"]


def test_readings_arrive_on_the_gui_thread_until_stopped(qtbot: QtBot) -> None:
    """The CPU is always among them; after the stop there is no thread and no snapshot."""
    poller, receiver = DevicePoller(interval_s=0.02), Receiver()
    poller.snapshots.connect(receiver.take)
    poller.start()
    qtbot.waitUntil(lambda: len(receiver.readings) >= 3, timeout=5000)
    poller.stop()
    assert monitor_threads() == []
    assert not poller.is_running
    assert receiver.threads == {QCoreApplication.instance().thread()}
    assert all("cpu" in {s.device for s in reading} for reading in receiver.readings)
    QCoreApplication.processEvents()
    count = len(receiver.readings)
    qtbot.wait(60)
    assert len(receiver.readings) == count


def test_the_devices_are_read_more_often_while_the_engine_works(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[float] = []
    monkeypatch.setattr(
        "engine.DeviceMonitor.pace", lambda self, interval_s: paces.append(interval_s)
    )
    poller = DevicePoller()
    poller.set_busy(True)  # before it runs
    poller.start()
    for busy in (False, True):
        poller.set_busy(busy)
    poller.stop()
    assert paces == [IDLE_S, BUSY_S]


def test_starting_and_stopping_twice_is_harmless(qtbot: QtBot) -> None:
    """There is at most one thread, and a stopped poller can start again."""
    poller = DevicePoller(interval_s=5)
    poller.stop()
    poller.start()
    poller.start()
    assert len(monitor_threads()) == 1
    poller.stop()
    poller.stop()
    with qtbot.waitSignal(poller.snapshots, timeout=5000):
        poller.start()
    poller.stop()
    assert monitor_threads() == []
