"""The split panel: what a person does with mouse and keyboard, and what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAccessible
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.theme import apply_theme, theme
from app.units import size_text
from app.views.load_options import context_stops
from app.views.split_panel import SplitPanel
from engine import (
    DeviceInfo,
    DeviceMemory,
    DevicePlan,
    DeviceSnapshot,
    LoadParams,
    MemoryUse,
    ModelInfo,
    ModelLoaded,
    Plan,
    Planner,
    SplitError,
    read_model_info,
)
from tests.helpers.tiny_gguf import tiny_gguf

GIB = 1 << 30
GPUS = [
    DeviceInfo(f"cuda:{i}", "cuda", f"RTX {n}", size * GIB, size * GIB, uuid=f"GPU-{i}")
    for i, (n, size) in enumerate(((4090, 24), (3090, 24), (3060, 12)))
]
CPU = DeviceInfo("cpu", "cpu", "Test CPU", 32 * GIB, 24 * GIB, n_cores=8)
INFO = ModelInfo(
    "/m/m.gguf", "M", "llama", True, 8, 64, 4, 2, 99, 8192, 1, 10 * GIB, "Q4_K_M", True, ()
)


class CountingPlanner:
    """Cuts at whole eighths; 10 GiB of weights and 1 MiB of cache per token."""

    calls = 0
    free_bytes: Mapping[str, int] | None = None

    def __init__(self, path: str) -> None:
        assert path == INFO.path

    def close(self) -> None:
        pass

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        type(self).calls += 1
        type(self).free_bytes = free_bytes
        n_ctx = params.context_for(INFO.n_ctx_train)
        shares = params.split or (1.0,)
        rows, before, asked = [], 0.0, 0.0
        for rank, (device, share) in enumerate(zip(params.devices, shares, strict=True)):
            asked += share
            end = round(asked * 8) / 8
            part, before = end - before, end
            memory = MemoryUse(int(10 * GIB * part), int(n_ctx * part * 1024**2))
            rows.append(DevicePlan(rank, device, share, part, memory, "packed"))
        return Plan(tuple(rows), params.split_mode, n_ctx, params.kv_type, 10 * GIB)


class RefusingPlanner(CountingPlanner):
    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        raise SplitError("This model cannot be split by tensor.", "Choose layers.")


def settle() -> None:
    """Let the panel plan and show."""
    for _ in range(3):
        QApplication.processEvents()


@pytest.fixture
def panel(qapp: QApplication, qtbot: QtBot) -> SplitPanel:
    """Three GPUs and the CPU, a model, on screen."""
    apply_theme(qapp, "dark")
    panel = SplitPanel(CountingPlanner)
    qtbot.addWidget(panel)
    panel.resize(420, 900)
    panel.set_devices([*GPUS, CPU])
    panel.set_model(INFO)
    panel.set_state("ready")
    panel.show()
    settle()
    return panel


def loaded_as(params: LoadParams) -> ModelLoaded:
    plan = CountingPlanner(params.path).plan(params)
    memory = tuple(
        DeviceMemory(d.device, d.memory, MemoryUse(d.memory.total * 100 // 101))
        for d in plan.devices
    )
    return ModelLoaded(INFO, params, plan.n_ctx, memory, 1.0)


def texts(panel: SplitPanel) -> str:
    return "\n".join(w.text() for w in panel.findChildren(QLabel) if w.isVisible())


def test_dragging_a_handle_moves_the_share_and_snaps_what_is_drawn(panel: SplitPanel) -> None:
    """The handle shows the reachable place; the engine is asked for what the person wanted."""
    bar = panel.header.bar
    handle = bar.handles[0]
    start = handle.geometry().center()
    target = QPoint(round(bar.width() * 0.27), start.y())
    QTest.mousePress(handle, Qt.MouseButton.LeftButton, pos=handle.rect().center())
    QTest.mouseMove(handle, handle.mapFromParent(target))
    QTest.mouseRelease(handle, Qt.MouseButton.LeftButton)
    settle()
    split = panel.load_params().split
    assert split is not None
    assert split[0] == pytest.approx(0.27, abs=0.02)
    assert split[2] == pytest.approx(0.2)
    drawn = handle.geometry().center().x() / bar.width()
    assert drawn == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("key", "cuts"),
    [
        (Qt.Key.Key_Right, 1),
        (Qt.Key.Key_Left, -1),
        (Qt.Key.Key_PageUp, 5),
        (Qt.Key.Key_PageDown, -3),
    ],
)
def test_keys_move_a_handle_by_what_the_model_allows(
    panel: SplitPanel, key: Qt.Key, cuts: int
) -> None:
    """One cut for an arrow, five for a page, and never past the neighbour."""
    handle = panel.header.bar.handles[0]
    before = handle.value()  # 40 % asked, three eighths possible
    assert before == 375
    QTest.keyClick(handle, key)
    settle()
    expected = min(before + cuts * 125, 800)
    assert handle.value() == pytest.approx(expected, abs=80)
    assert (handle.value() - before) * cuts > 0


def test_a_handle_speaks_to_assistive_technology(panel: SplitPanel) -> None:
    """Name with device, percent and memory; a slider with a value."""
    handle = panel.header.bar.handles[0]
    assert handle.accessibleName().startswith("GPU 0, 38 percent, ")
    assert "of 24.0 gibibytes" in handle.accessibleName()
    face = QAccessible.queryAccessibleInterface(handle)
    assert face.role() == QAccessible.Role.Slider
    assert face.valueInterface().currentValue() == handle.value()


def test_slider_and_number_of_a_row_move_together(panel: SplitPanel) -> None:
    """Both show the asked share, and the other rows make room."""
    row = panel.rows[0]
    row.number.setValue(60.0)
    settle()
    assert row.slider.value() == 600
    numbers = [panel.rows[i].number.value() for i in range(3)]
    assert sum(numbers) == pytest.approx(100, abs=0.11)
    assert numbers[1] == pytest.approx(2 * numbers[2], abs=0.11)
    row.slider.setValue(200)
    settle()
    assert row.number.value() == pytest.approx(20)
    assert "asked 20.0 · possible 25.0" in texts(panel)


def test_many_changes_in_one_turn_are_planned_once(panel: SplitPanel) -> None:
    """A drag sends more events than can be planned."""
    calls = CountingPlanner.calls
    for share in range(100, 700, 10):
        panel.rows[0].slider.setValue(share)
    assert CountingPlanner.calls == calls
    settle()
    assert CountingPlanner.calls == calls + 1


def test_a_text_that_is_typed_survives_the_next_reading(panel: SplitPanel) -> None:
    """Devices are read every second; nobody types a context length faster than that."""
    for field in (panel.options.context, panel.rows[0].number):
        field.setFocus()
        field.lineEdit().setText("31")
        panel.set_snapshots([DeviceSnapshot("cuda:0", 0.0, GIB, 24 * GIB, 23 * GIB)])
        settle()
        assert field.lineEdit().text().removesuffix(" %") == "31"
    QTest.keyClick(panel.rows[0].number, Qt.Key.Key_Return)
    settle()
    split = panel.load_params().split
    assert split is not None
    assert split[0] == pytest.approx(0.31)


def test_the_planner_knows_the_free_memory(panel: SplitPanel) -> None:
    """It decides whether weights stay packed: total less what others use, in coarse steps."""
    panel.set_snapshots([DeviceSnapshot("cuda:0", 0.0, 14 * GIB, 24 * GIB, 10 * GIB)])
    settle()
    assert CountingPlanner.free_bytes is not None
    assert CountingPlanner.free_bytes["cuda:0"] == 10 * GIB
    assert CountingPlanner.free_bytes["cuda:1"] == 24 * GIB
    calls = CountingPlanner.calls
    panel.set_snapshots([DeviceSnapshot("cuda:0", 0.0, 14 * GIB - 1000, 24 * GIB, 10 * GIB)])
    settle()
    assert CountingPlanner.calls == calls


def test_switching_a_device_off_leaves_it_out(panel: SplitPanel, qtbot: QtBot) -> None:
    """By the switch of its row, with the keyboard too."""
    with qtbot.waitSignal(panel.settings_changed):
        QTest.keyClick(panel.rows[1].switch, Qt.Key.Key_Space)
    settle()
    assert panel.load_params().devices == ("cuda:0", "cuda:2")
    assert panel.rows[1].slider.isHidden() or not panel.rows[1].slider.isVisible()
    assert len(panel.header.bar.handles) == 1


def test_one_device_mode_asks_for_one_device(panel: SplitPanel) -> None:
    """The switches choose which."""
    QTest.mouseClick(panel.header.mode_button("single"), Qt.MouseButton.LeftButton)
    settle()
    assert panel.load_params().devices == ("cuda:0",)
    QTest.mouseClick(panel.rows[2].switch, Qt.MouseButton.LeftButton)
    settle()
    assert panel.load_params().devices == ("cuda:2",)
    assert [panel.rows[i].switch.isChecked() for i in range(4)] == [False, False, True, False]


def test_the_mode_reaches_the_engine(panel: SplitPanel) -> None:
    """Layers and tensor keep the same shares."""
    before = panel.load_params()
    panel.header.mode_button("layer").click()
    after = panel.load_params()
    assert (before.split_mode, after.split_mode) == ("tensor", "layer")
    assert before.split == after.split


def test_options_feed_the_load(qapp: QApplication, qtbot: QtBot) -> None:
    """Context, cache type and threads; threads only where a CPU takes part."""
    panel = SplitPanel(CountingPlanner)
    qtbot.addWidget(panel)
    panel.set_devices([CPU])
    panel.set_model(INFO)
    panel.show()
    settle()
    options = panel.options
    assert options.threads.isVisible()
    assert options.context.value() == 2048
    options.context_slider.setValue(options.context_slider.maximum())
    options.kv_type.setCurrentIndex(options.kv_type.findData("bf16"))
    options.threads.setValue(3)
    settle()
    params = panel.load_params()
    assert (params.n_ctx, params.kv_type, params.cpu_threads) == (8192, "bf16", 3)
    assert options.context.value() == 8192
    options.context.setValue(1000)
    options.threads.setValue(0)
    settle()
    assert (panel.load_params().n_ctx, panel.load_params().cpu_threads) == (1000, None)


def test_cpu_ranks_can_be_added_where_there_is_no_gpu(
    panel: SplitPanel, qapp: QApplication, qtbot: QtBot
) -> None:
    """On a machine with GPUs the field is not shown."""
    assert not panel.cpu_ranks.isVisible()
    cpu_panel = SplitPanel(CountingPlanner)
    qtbot.addWidget(cpu_panel)
    cpu_panel.set_devices([CPU])
    cpu_panel.set_model(INFO)
    cpu_panel.show()
    settle()
    assert cpu_panel.cpu_ranks.isVisible()
    cpu_panel.cpu_ranks.setValue(3)
    settle()
    assert cpu_panel.load_params().devices == ("cpu", "cpu", "cpu")
    assert [row.title.text() for row in cpu_panel.rows] == ["CPU 0", "CPU 1", "CPU 2"]
    cpu_panel.cpu_ranks.setValue(1)
    settle()
    assert cpu_panel.load_params().devices == ("cpu",)


def test_what_does_not_fit_is_said_in_the_danger_colour(panel: SplitPanel) -> None:
    """Where and by how much; it comes from the live memory figures."""
    assert not panel.problem.isVisible()
    panel.set_snapshots([DeviceSnapshot("cuda:0", 0.0, 21 * GIB, 24 * GIB, 3 * GIB)])
    settle()
    assert "GPU 0 would need 4.5 GiB but 3.0 GiB can be had: 1.5 GiB short." in texts(panel)
    assert panel.problem.palette().windowText().color().name() == theme().danger
    assert panel.rows[0].use.property("role") == "shortage"
    assert panel.footer.load.isEnabled()


def test_an_error_of_the_planner_is_a_sentence_and_stops_loading(
    qapp: QApplication, qtbot: QtBot
) -> None:
    """Message and hint; no plan, no load."""
    panel = SplitPanel(RefusingPlanner)
    qtbot.addWidget(panel)
    panel.set_devices([*GPUS])
    panel.set_model(INFO)
    panel.set_state("ready")
    panel.show()
    settle()
    assert panel.problem.text() == "This model cannot be split by tensor. Choose layers."
    assert not panel.footer.load.isEnabled()
    panel.set_model(None)
    panel.set_state("empty")
    settle()
    assert not panel.problem.isVisible()


def test_the_buttons_follow_the_state(panel: SplitPanel, qtbot: QtBot) -> None:
    """Load, then cancel with progress, then eject and reload."""
    footer = panel.footer
    with qtbot.waitSignal(panel.load_requested):
        footer.load.click()
    panel.set_state("loading")
    panel.set_progress(0.4)
    settle()
    assert footer.progress.isVisible()
    assert footer.progress.value() == 400
    assert not panel.header.isEnabled()
    with qtbot.waitSignal(panel.cancel_requested):
        footer.cancel.click()
    panel.set_loaded(loaded_as(panel.load_params()))
    settle()
    assert not footer.load.isEnabled()
    with qtbot.waitSignal(panel.eject_requested):
        footer.eject.click()
    panel.rows[0].number.setValue(70)
    settle()
    assert footer.load.text() == "Reload to apply"
    assert footer.load.isEnabled()
    panel.set_state("ready")
    settle()
    assert (footer.load.text(), footer.eject.isVisible()) == ("Load", False)


def test_after_the_load_prediction_and_measurement_stand_side_by_side(panel: SplitPanel) -> None:
    """Per rank with the error, and the measured speed."""
    panel.set_loaded(loaded_as(panel.load_params()))
    panel.set_speed(61.84)
    settle()
    shown = texts(panel)
    assert "61.8" in shown
    assert shown.count("+1.0 %") == 3
    panel.set_state("ready")
    settle()
    assert "+1.0 %" not in texts(panel)


def test_memory_figures_stand_still_while_loading(panel: SplitPanel) -> None:
    """Or the half-loaded model would be taken for other programs."""
    settle()
    panel.set_state("loading")
    panel.set_snapshots([DeviceSnapshot("cuda:0", 0.0, 23 * GIB, 24 * GIB, GIB)])
    settle()
    assert not panel.problem.isVisible()


def test_state_survives_json_and_a_new_panel(
    panel: SplitPanel, qapp: QApplication, qtbot: QtBot
) -> None:
    """Restored before or after the devices are known."""
    panel.rows[0].number.setValue(55)
    panel.header.mode_button("layer").click()
    panel.options.context.setValue(4096)
    saved = json.loads(json.dumps(panel.state()))
    for devices_first in (True, False):
        again = SplitPanel(CountingPlanner)
        qtbot.addWidget(again)
        if devices_first:
            again.set_devices([*GPUS, CPU])
        again.restore(saved)
        again.set_devices([*GPUS, CPU])
        again.set_model(INFO)
        before, after = panel.load_params(), again.load_params()
        assert after.split == pytest.approx(before.split)
        assert (after.split_mode, after.n_ctx) == ("layer", 4096)


def test_a_smaller_model_takes_the_context_down(panel: SplitPanel) -> None:
    """A context beyond what it was trained for is never carried over."""
    panel.options.context.setValue(8192)
    small = ModelInfo(INFO.path, "S", "llama", True, 8, 64, 4, 2, 99, 512, 1, GIB, "F16", True, ())
    panel.set_model(small)
    assert panel.load_params().n_ctx == 512


def test_context_stops_end_with_what_the_model_was_trained_for() -> None:
    """Powers of two below it; an unknown length offers 32k."""
    assert context_stops(40960) == [512, 1024, 2048, 4096, 8192, 16384, 32768, 40960]
    assert context_stops(256) == [256]
    assert context_stops(0)[-1] == 32768


def test_a_gpu_that_cannot_be_used_is_named_with_its_reason(
    qapp: QApplication, qtbot: QtBot
) -> None:
    """It has no row, but it is not silently missing."""
    broken = DeviceInfo(
        "cuda:0", "cuda", "NVIDIA GTX 1060", GIB, GIB, usable=False, reason="Too old."
    )
    panel = SplitPanel(CountingPlanner)
    qtbot.addWidget(panel)
    panel.set_devices([broken, CPU])
    panel.show()
    settle()
    assert "GTX 1060: Too old." in texts(panel)
    assert panel.load_params().devices == ("cpu",)


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_real_file_is_planned_while_its_handles_move(
    mode: str, qapp: QApplication, qtbot: QtBot, tmp_path: Path
) -> None:
    """With the engine's own planner: each key changes what is possible, the bytes add up."""
    path = tiny_gguf(tmp_path / "tiny.gguf", n_layer=6, n_head_kv=4, n_ff=256)
    panel = SplitPanel()
    qtbot.addWidget(panel)
    panel.set_devices([CPU])
    panel.set_model(read_model_info(path))
    panel.cpu_ranks.setValue(3)
    panel.header.mode_button("tensor" if mode == "tensor" else "layer").click()
    panel.show()
    settle()
    handle = panel.header.bar.handles[0]
    before = handle.value()
    for _ in range(2):
        QTest.keyClick(handle, Qt.Key.Key_Right)
        settle()
        assert handle.value() > before
        before = handle.value()
    plan = Planner(path).plan(panel.load_params(), {"cpu": 24 * GIB})
    assert panel.summary.total.text() == size_text(plan.total_bytes)
    assert not panel.problem.isVisible()
    panel.set_model(None)


def test_even_and_by_memory_fill_the_shares(panel: SplitPanel) -> None:
    """By what is free now, not by what the cards were sold with."""
    panel.header.even_requested.emit()
    assert panel.load_params().split == pytest.approx((1 / 3,) * 3)
    panel.set_snapshots(
        [
            DeviceSnapshot("cuda:0", 0.0, 18 * GIB, 24 * GIB, 6 * GIB),
            DeviceSnapshot("cuda:1", 0.0, 12 * GIB, 24 * GIB, 12 * GIB),
            DeviceSnapshot("cuda:2", 0.0, 6 * GIB, 12 * GIB, 6 * GIB),
        ]
    )
    panel.header.by_memory_requested.emit()
    assert panel.load_params().split == pytest.approx((0.25, 0.5, 0.25))


def test_the_memory_bar_is_painted_in_the_colour_of_its_device(panel: SplitPanel) -> None:
    """Each row from the left in its own colour."""
    for index in range(3):
        image = panel.rows[index].memory_bar.grab().toImage()
        assert image.pixelColor(2, image.height() // 2).name() == theme().device_colour(index)
