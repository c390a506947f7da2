"""What the monitor shows of devices beside memory and load: graphs, the overview, and files."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QHelpEvent, QImage
from PySide6.QtWidgets import QApplication, QToolTip
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.core.settings import Settings
from app.devices.monitor.record import FIGURES, spoken_state
from app.devices.monitor.views.monitor_panel import MonitorHead, MonitorPanel, graph_names
from app.devices.monitor.views.overview import GAP, MIN_BAR, Overview
from app.main import Shell
from engine import DeviceInfo, DeviceSnapshot
from tests.helpers.shell_driver import MODEL, MakeShell, ask

GIB = 1 << 30


def gpu(at: float, **more: object) -> DeviceSnapshot:
    """Return a GPU of which the driver tells all."""
    known = {
        "load_percent": 91.0, "temperature_c": 83.0, "power_w": 215.4, "clock_mhz": 2520,
        "power_limit_w": 450.0, "memory_clock_mhz": 10501, "clock_limits": ("heat",),
        "sent_bytes_s": 100_000_000, "received_bytes_s": 2_000_000_000, "others_bytes": GIB,
    }  # fmt: skip
    figures = {**known, **more}
    return DeviceSnapshot("cuda:0", at, 6 * GIB, 24 * GIB, 18 * GIB, **figures)  # type: ignore[arg-type]


def cpu(at: float) -> DeviceSnapshot:
    return DeviceSnapshot("cpu", at, 8 * GIB, 32 * GIB, 24 * GIB, 12.0, others_percent=34.0)


def test_a_chosen_graph_is_drawn_and_others_are_not(monitor: MonitorPanel) -> None:
    monitor.choose(False, ("power", "traffic"))
    monitor.add_snapshots([gpu(1000.0), cpu(1000.0)])
    shown = [name for name, plot in monitor.plots.items() if plot.isVisible()]
    assert shown == ["power", "traffic"]
    assert list(monitor.plots["power"].graph.curves["cuda:0"].values) == [215.4]
    assert monitor.plots["power"].accessibleDescription() == "GPU 0 215 W"
    assert monitor.plots["traffic"].accessibleDescription() == "GPU 0 2.1 GB/s"
    assert monitor.plots["memory"].graph.curves == {}


def test_every_figure_has_a_graph_with_its_history(monitor: MonitorPanel) -> None:
    """Also of the time before it was chosen."""
    for second in range(3):
        monitor.add_snapshots([gpu(1000.0 + second), cpu(1000.0 + second)])
    monitor.choose(False, graph_names())
    drawn = {name: list(monitor.plots[name].graph.curves) for name in FIGURES}
    of_both = {"memory", "load"}
    assert drawn == {n: ["cuda:0", "cpu"] if n in of_both else ["cuda:0"] for n in FIGURES}
    assert len(monitor.plots["clock"].graph.curves["cuda:0"].values) == 3


def test_the_overview_has_a_line_for_each_device(monitor: MonitorPanel) -> None:
    """It is read to those who cannot see it, and nothing else is drawn meanwhile."""
    monitor.set_devices([DeviceInfo("cuda:0", "cuda", "NVIDIA GeForce RTX 4090", 24 * GIB, GIB)])
    monitor.choose(True, ("memory",))
    monitor.add_snapshots([gpu(1000.0), cpu(1000.0)])
    assert monitor.overview.isVisible()
    assert not monitor.memory.isVisible()
    assert monitor.memory.graph.curves == {}
    assert monitor.overview.accessibleDescription() == (
        "GPU 0: memory 6.0 / 24.0 GiB, load 91 %, power 215 / 450 W, 83 °C, clock 2520 MHz · heat,"
        " memory clock 10501 MHz, PCIe ↓ 2.0 ↑ 0.1 GB/s, other programs 1.0 GiB. "
        "CPU 0: memory 8.0 / 32.0 GiB, load 12 %, other programs 34 %"
    )


def test_what_a_driver_does_not_tell_is_left_out_and_a_lost_gpu_says_why() -> None:
    bare = DeviceSnapshot("cuda:0", 0.0, GIB, 2 * GIB, GIB)
    assert spoken_state("GPU 0", bare) == "GPU 0: memory 1.0 / 2.0 GiB"
    lost = DeviceSnapshot("cuda:0", 0.0, 0, 0, 0, problem="The GPU fell off the bus.")
    assert spoken_state("GPU 0", lost) == "GPU 0: The GPU fell off the bus."


@pytest.mark.parametrize(("width", "n_columns"), [(300, 0), (560, 1), (900, 4), (1400, 5)])
def test_the_overview_drops_columns_rather_than_overlap(
    qtbot: QtBot, width: int, n_columns: int
) -> None:
    overview = Overview()
    qtbot.addWidget(overview)
    overview.resize(width, 100)
    columns, bar = overview._fitting()
    assert len(columns) == n_columns
    assert bar >= MIN_BAR
    end = overview._bars_left() + 2 * (bar + GAP) + sum(c.width + GAP for c in columns)
    if columns:
        assert end - GAP <= width


def test_a_tool_tip_tells_all_of_a_device_and_when_a_message_was_sent(
    monitor: MonitorPanel,
) -> None:
    monitor.choose(True, ("memory",))
    monitor.add_snapshots([gpu(1000.0), cpu(1000.0)])
    tip(monitor.overview, QPoint(20, 30))
    assert "memory clock 10501 MHz" in QToolTip.text()
    monitor.choose(False, ("memory", "load", "rate"))
    monitor.mark_message()
    now = time.monotonic()
    monitor.add_snapshots([gpu(now + 60)])
    QApplication.processEvents()
    for plot in (monitor.memory, monitor.load, monitor.speed):
        middle = plot.graph.point(-60, 0).toPoint()
        assert plot.graph.mark_at(middle.x() - 20) == ""
        tip(plot.graph, middle)
        assert QToolTip.text().startswith("Message at ")
        QToolTip.hideText()


def tip(widget: object, place: QPoint) -> None:
    event = QHelpEvent(QEvent.Type.ToolTip, place, QPoint(50, 50))
    QApplication.sendEvent(widget, event)  # type: ignore[call-overload]


def test_the_choice_is_kept_over_a_restart(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    head = shell.window.findChild(MonitorHead)
    assert head is not None
    head._actions["power"].trigger()
    qtbot.mouseClick(head.overview, Qt.MouseButton.LeftButton)
    assert shell.monitor.overview.isVisible()
    shell.window.close()
    saved = json.loads(settings_file().read_text())
    assert saved["monitor_graphs"] == ["memory", "load", "rate", "power"]
    again = make_shell()
    assert again.monitor.overview.isVisible()
    again.window.findChild(MonitorHead).overview.click()
    assert again.monitor.plots["power"].isVisible()


def test_the_last_graph_cannot_be_hidden(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    head = shell.window.findChild(MonitorHead)
    assert head is not None
    head._actions["memory"].trigger()
    head._actions["load"].trigger()
    assert not head._actions["rate"].isEnabled()
    assert shell.settings.current.monitor_graphs == ("rate",)


def test_unknown_graphs_of_another_version_are_ignored(
    make_shell: MakeShell, tmp_path: Path
) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(json.dumps({"monitor_graphs": ["from_the_future"]}))
    shell = make_shell()
    assert [name for name, plot in shell.monitor.plots.items() if plot.isVisible()] == [
        "memory", "load", "rate",
    ]  # fmt: skip


def test_what_is_shown_is_saved_as_a_table(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    shell.poller.stop()
    ask(qtbot, shell, "Hi")
    later = time.monotonic() + 1
    shell.monitor.add_snapshots([gpu(later), cpu(later)])
    path = save(shell, qtbot, tmp_path / "figures", ".csv", monkeypatch)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert rows[-1]["Seconds"] == "0.0"
    assert rows[-1]["Memory GPU 0 (GiB)"] == "6"
    assert rows[-1]["Load CPU 0 (%)"] == "12"
    assert rows[-1]["Message"] == "1"
    assert "Power GPU 0 (W)" not in rows[-1]  # its graph is not shown
    shell.monitor_presenter._on_chosen(True, Settings().monitor_graphs)
    path = save(shell, qtbot, tmp_path / "all", ".csv", monkeypatch)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert rows[-1]["Power GPU 0 (W)"] == "215.4"


def test_what_is_shown_is_saved_as_a_picture(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    path = save(shell, qtbot, tmp_path / "graphs", ".png", monkeypatch)
    picture = QImage(str(path))
    assert picture.size() == shell.monitor.grab().toImage().size()


@pytest.mark.parametrize("suffix", [".csv", ".png"])
def test_a_file_that_cannot_be_written_is_told(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, suffix: str
) -> None:
    shell = make_shell()
    shell.monitor_presenter.save(tmp_path / "nowhere" / f"x{suffix}")
    qtbot.waitUntil(lambda: shell.window.banner.notice is not None)
    notice = shell.window.banner.notice
    assert notice is not None
    assert f"x{suffix} cannot be written" in notice.text
    assert notice.hint == "Choose another folder."


def save(
    shell: Shell, qtbot: QtBot, path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Save this view under a name without its suffix; return the file's path."""
    monkeypatch.setattr("app.widgets.text.QFileDialog.getSaveFileName", lambda *a: (str(path), ""))
    head = shell.window.findChild(MonitorHead)
    assert head is not None
    with qtbot.waitSignal(shell.monitor_presenter.noticed):
        head.export_requested.emit(suffix)
    return Path(f"{path}{suffix}")
