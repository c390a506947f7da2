"""The share bar: its handles follow mouse and keys, and stop where the model can be split."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAccessible
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.units import size_text
from engine import Planner, read_model_info
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU, GIB, FakePlanner, RefusingPlanner
from tests.helpers.split_panels import (
    WiredPanel,
    drag,
    move,
    painted_position,
    press,
    release,
    settle,
)
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.mark.parametrize(("mouse", "lands"), [(0.27, 2), (0.33, 3), (0.31, 2), (0.6, 5), (0.0, 0)])
def test_a_dragged_handle_stands_on_the_nearest_position(
    panel: WiredPanel, mouse: float, lands: int
) -> None:
    """It does so while the mouse is down; the third device keeps its share."""
    handle = panel.header.bar.handles[0]
    press(handle)
    move(panel, handle, mouse)
    settle()
    assert painted_position(panel, handle) == pytest.approx(lands / 8, abs=0.02)
    release(handle)
    settle()
    split = panel.session.load_params().split
    assert split is not None
    assert round(split[0] * 8) == lands
    assert split[2] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("key", "lands"),
    [
        (Qt.Key.Key_Right, 4), (Qt.Key.Key_Up, 4), (Qt.Key.Key_Left, 2), (Qt.Key.Key_Down, 2),
        (Qt.Key.Key_PageUp, 6), (Qt.Key.Key_PageDown, 0), (Qt.Key.Key_Home, 0),
        (Qt.Key.Key_End, 6),
    ],
)  # fmt: skip
def test_keys_move_a_handle_by_what_the_model_allows(
    panel: WiredPanel, key: Qt.Key, lands: int
) -> None:
    """An arrow moves by one place, a page key by ten, and never past the neighbour."""
    handle = panel.header.bar.handles[0]
    assert handle.value() == 375  # 40 % asked, three eighths possible
    QTest.keyClick(handle, key)
    settle()
    assert handle.value() == lands * 125


def test_a_key_that_the_handle_does_not_know_is_left_to_others(panel: WiredPanel) -> None:
    before = panel.session.load_params()
    QTest.keyClick(panel.header.bar.handles[0], Qt.Key.Key_A)
    assert panel.session.load_params() == before


def test_a_handle_speaks_to_assistive_technology(panel: WiredPanel) -> None:
    """It is a slider with a value, named by device, percent and memory."""
    handle = panel.header.bar.handles[0]
    assert handle.accessibleName().startswith("GPU 0, 38 percent, ")
    assert "of 24.0 gibibytes" in handle.accessibleName()
    face = QAccessible.queryAccessibleInterface(handle)
    assert face.role() == QAccessible.Role.Slider
    assert face.valueInterface().currentValue() == handle.value()


def test_a_lock_holds_the_handles_beside_it(panel: WiredPanel) -> None:
    """They say so, and neither mouse nor keys move them; the others still move."""
    panel.rows[0].lock.click()
    settle()
    first, second = panel.header.bar.handles
    before = panel.session.load_params()
    assert not first.isEnabled()
    assert first.accessibleName().startswith("Locked. ")
    drag(panel, first, 0.1)
    QTest.keyClick(first, Qt.Key.Key_Right)
    assert panel.session.load_params() == before
    QTest.keyClick(second, Qt.Key.Key_Home)
    settle()
    after = panel.session.load_params().split
    assert after is not None
    assert after[0] == pytest.approx(0.4)
    assert after[1] == pytest.approx(0)


def test_many_events_in_one_turn_are_planned_once(panel: WiredPanel) -> None:
    """A drag sends more events than can be planned."""
    calls = FakePlanner.calls
    for share in range(100, 700, 10):
        panel.rows[0].slider.setValue(share)
    assert FakePlanner.calls == calls
    settle()
    assert FakePlanner.calls == calls + 1
    handle = panel.header.bar.handles[0]
    press(handle)
    for n in range(60):
        panel.header.bar.dragged.emit(0, 0.2 + n / 600)
    calls = FakePlanner.calls
    settle()
    assert FakePlanner.calls <= calls + 12  # what is looked at around one place, once
    assert painted_position(panel, handle) == pytest.approx(0.25, abs=0.01)
    release(handle)


def test_without_a_plan_handles_go_where_they_are_dragged(make_panel: MakePanel) -> None:
    """Without a plan, all places are possible."""
    for panel in (make_panel(planner=RefusingPlanner), make_panel(info=None)):
        handle = panel.header.bar.handles[0]
        drag(panel, handle, 0.27)
        split = panel.session.load_params().split
        assert split is not None
        assert split[0] == pytest.approx(0.27, abs=0.02)
        before = split[0]
        QTest.keyClick(handle, Qt.Key.Key_Right)
        settle()
        split = panel.session.load_params().split
        assert split is not None
        assert split[0] == pytest.approx(before + 0.01)


@pytest.mark.parametrize("mode", ["tensor", "layer", "groups"])
def test_a_real_file_is_planned_while_its_handles_move(
    mode: str, qapp: QApplication, qtbot: QtBot, tmp_path: Path
) -> None:
    """With the engine's planner, each key changes the plan, and the bytes add up."""
    path = tiny_gguf(tmp_path / "tiny.gguf", n_layer=6, n_head_kv=4, n_ff=256)
    panel = WiredPanel()
    qtbot.addWidget(panel)
    panel.session.set_devices([CPU])
    panel.session.set_model(read_model_info(path))
    panel.cpu_ranks.setValue(3)
    panel.session.restore(panel.session.to_dict() | {"mode": mode})
    panel.show()
    settle()
    handle = panel.header.bar.handles[0]
    before = handle.value()
    for _ in range(2):
        QTest.keyClick(handle, Qt.Key.Key_Right)
        settle()
        assert handle.value() > before
        before = handle.value()
    plan = Planner(path).plan(panel.session.load_params(), {"cpu": 24 * GIB})
    for device, row in zip(plan.devices, panel.rows, strict=True):
        assert row.use.accessibleName().startswith(f"{size_text(device.memory.total)} of 32.0 GiB")
    assert not panel.problem.isVisible()
    panel.session.set_model(None)
