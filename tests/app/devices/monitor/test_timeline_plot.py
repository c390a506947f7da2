"""The timeline shows how each rank spent the time of tokens."""

from __future__ import annotations

import math
import time

import pytest
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.monitor.views.graph import AXIS_WIDTH, WAIT_FADE, TimelinePlot, binned
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.widgets.theme import apply_theme, mix, theme
from engine import DeviceSnapshot, RankTimes, TokenTimes

GIB = 1 << 30


def token(*ranks: tuple[float, float], seconds: float = 0.02) -> TokenTimes:
    """Return a token's times from the parts that each rank computes and waits."""
    return TokenTimes(7, seconds, tuple(RankTimes(c * seconds, w * seconds) for c, w in ranks))


def reading(at: float) -> list[DeviceSnapshot]:
    return [DeviceSnapshot("cpu", at, 8 * GIB, 32 * GIB, 24 * GIB, 12.0)]


def test_it_shows_when_there_is_something_to_show(monitor: MonitorPanel) -> None:
    """It is hidden before the first token, and again for another model."""
    monitor.set_ranks(["cpu", "cpu"])
    monitor.add_snapshots(reading(time.monotonic()))
    assert not monitor.timeline.isVisible()
    monitor.add_times(token((0.8, 0.1), (0.5, 0.4)))
    monitor.add_snapshots(reading(time.monotonic()))
    assert monitor.timeline.isVisible()
    monitor.set_ranks([])
    monitor.add_snapshots(reading(time.monotonic()))
    assert not monitor.timeline.isVisible()


def test_the_newest_token_stands_there_as_text(monitor: MonitorPanel) -> None:
    monitor.set_ranks(["cpu", "cpu"])
    monitor.add_times(token((0.8, 0.1), (0.5, 0.4)))
    monitor.add_snapshots(reading(time.monotonic()))
    timeline = monitor.timeline
    assert timeline.accessibleDescription() == (
        "20.0 ms per token: CPU 0: 80 % computing, 10 % waiting; "
        "CPU 1: 50 % computing, 40 % waiting"
    )
    assert "80 %" in timeline.latest.text()
    assert theme().device_colour(1) in timeline.latest.text(), "the second rank's colour"


def test_tokens_of_another_split_are_left_out(monitor: MonitorPanel) -> None:
    """They were on the way when the split changed."""
    monitor.set_ranks(["cpu", "cpu"])
    monitor.add_times(token((0.8, 0.1)))
    assert not monitor.timeline.has_data


def test_heights_are_parts_of_the_time(qapp: QApplication, qtbot: QtBot) -> None:
    """At "now": computing at the bottom in full colour, waiting above it, paler; then nothing."""
    apply_theme(qapp, "dark")
    plot = TimelinePlot()
    qtbot.addWidget(plot)
    plot.resize(400, 160)
    plot.show()
    plot.set_ranks(["CPU 0"])
    for second in range(100):
        plot.add(1000.0 + second, token((0.5, 0.3)))
    plot.show_until(1100.0, [0])
    QApplication.processEvents()
    image = plot.strips.grab().toImage()
    column = [image.pixelColor(image.width() - 12, y).name() for y in range(22)]
    full = QColor(theme().device_colour(0)).name()
    pale = mix(full, theme().raised, WAIT_FADE)
    assert column.count(full) == pytest.approx(11, abs=2)
    assert column.count(pale) == pytest.approx(6.6, abs=2)
    assert column.index(pale) < column.index(full), "computing lies below"
    empty = image.pixelColor(AXIS_WIDTH + 4, 10).name()
    assert empty == theme().raised, "two minutes ago there was nothing"


def test_bins_are_means() -> None:
    places, values = [0.0, 0.1, 0.6, 1.0], [1.0, 3.0, 5.0, 7.0]
    assert binned(places, values, 4) == pytest.approx([2.0, math.nan, 5.0, 7.0], nan_ok=True)


def test_a_refresh_with_the_timeline_stays_cheap(monitor: MonitorPanel) -> None:
    """The measured CPU time is for four ranks and two minutes of tokens, the best of many runs."""
    monitor.set_ranks(["cpu"] * 4)
    now = time.monotonic()
    for number in range(1200):
        monitor.timeline.add(now - 120 + number / 10, token(*[(0.7, 0.2)] * 4))
    costs = []
    for second in range(15):
        start = time.thread_time()
        monitor.add_snapshots(reading(now + second / 100))
        QApplication.processEvents()
        costs.append(time.thread_time() - start)
    assert min(costs) < 0.02
