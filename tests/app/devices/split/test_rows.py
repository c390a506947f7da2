"""Device rows: share, lock, order, reserve, groups, and bytes by kind."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLineEdit, QWidget
from pytestqt.qtbot import QtBot

from app.widgets.theme import apply_theme, theme
from engine import DeviceInfo
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU, GIB, FakePlanner
from tests.helpers.split_panels import WiredPanel, settle, texts, used


def test_slider_and_number_of_a_row_move_together(panel: WiredPanel) -> None:
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
    assert "target 20.0 · actual 25.0 %" in texts(panel)


def test_a_text_that_is_typed_survives_the_next_reading(panel: WiredPanel) -> None:
    """Devices are read every second; nobody types a context length faster than that."""
    for field in (panel.options.context, panel.rows[0].number):
        field.setFocus()
        field.lineEdit().setText("31")
        panel.session.set_snapshots([used("cuda:0", 1)])
        settle()
        assert field.lineEdit().text().removesuffix(" %") == "31"
    QTest.keyClick(panel.rows[0].number, Qt.Key.Key_Return)
    settle()
    split = panel.session.load_params().split
    assert split is not None
    assert split[0] == pytest.approx(0.31)


def test_a_locked_device_keeps_its_share(panel: WiredPanel) -> None:
    """Its fields are disabled, and the others share the rest, also by the quick buttons."""
    row = panel.rows[1]
    assert row.lock.accessibleName() == "Lock the share of GPU 1"
    QTest.keyClick(row.lock, Qt.Key.Key_Space)
    settle()
    assert row.lock.accessibleName() == "Unlock the share of GPU 1"
    assert not row.slider.isEnabled()
    assert not row.number.isEnabled()
    panel.rows[0].number.setValue(10)
    settle()
    assert panel.session.load_params().split == pytest.approx((0.1, 0.4, 0.5))
    panel.header.even_requested.emit()
    assert panel.session.load_params().split == pytest.approx((0.3, 0.4, 0.3))
    row.lock.click()
    panel.header.even_requested.emit()
    assert panel.session.load_params().split == pytest.approx((1 / 3,) * 3)


def test_switching_a_device_off_leaves_it_out(panel: WiredPanel, qtbot: QtBot) -> None:
    """The switch of its row does it, also from the keyboard."""
    with qtbot.waitSignal(panel.session.settings_changed):
        QTest.keyClick(panel.rows[1].switch, Qt.Key.Key_Space)
    settle()
    assert panel.session.load_params().devices == ("cuda:0", "cuda:2")
    assert not panel.rows[1].slider.isVisible()
    assert len(panel.header.bar.handles) == 1


def test_one_device_mode_asks_for_one_device(panel: WiredPanel) -> None:
    """The switches choose the device."""
    QTest.mouseClick(panel.header.mode_button("single"), Qt.MouseButton.LeftButton)
    settle()
    assert panel.session.load_params().devices == ("cuda:0",)
    QTest.mouseClick(panel.rows[2].switch, Qt.MouseButton.LeftButton)
    settle()
    assert panel.session.load_params().devices == ("cuda:2",)
    assert [panel.rows[i].switch.isChecked() for i in range(4)] == [False, False, True, False]


def test_the_mode_reaches_the_engine(panel: WiredPanel) -> None:
    """All modes keep the same shares."""
    before = panel.session.load_params()
    for mode in ("layer", "groups", "tensor"):
        panel.header.mode_button(mode).click()  # type: ignore[arg-type]
        after = panel.session.load_params()
        assert after.split_mode == mode
        assert after.split == before.split


def test_groups_are_made_of_neighbours(panel: WiredPanel) -> None:
    """Each row but the first has a check box for the group above; a text sums up the groups."""
    assert not panel.rows[1].join.isVisible()
    panel.header.mode_button("groups").click()
    settle()
    assert [row.join.isVisible() for row in panel.rows] == [False, True, True, False]
    assert panel.session.load_params().groups == (2, 1)
    QTest.keyClick(panel.rows[2].join, Qt.Key.Key_Space)
    settle()
    assert panel.session.load_params().groups == (3,)
    QTest.keyClick(panel.rows[2].join, Qt.Key.Key_Space)
    settle()
    assert panel.header.hint.accessibleName() == "GPU 0 + GPU 1 → GPU 2"
    panel.rows[1].switch.click()
    settle()
    assert panel.session.load_params().groups == (1, 1)
    panel.header.mode_button("tensor").click()
    assert panel.session.load_params().groups is None


def test_devices_can_be_put_in_another_order(panel: WiredPanel) -> None:
    """A row keeps its share, colour and focus."""
    row = panel.rows[2]
    row.more.click()
    settle()
    assert row.details.up.accessibleName() == "Move GPU 2 up"
    row.details.up.setFocus()
    QTest.keyClick(row.details.up, Qt.Key.Key_Space)
    settle()
    params = panel.session.load_params()
    assert params.devices == ("cuda:0", "cuda:2", "cuda:1")
    assert params.split == pytest.approx((0.4, 0.2, 0.4))
    assert panel.rows[1] is row
    assert row.y() < panel.rows[2].y()
    assert QApplication.focusWidget() is row.details.up
    row.details.up.click()
    settle()
    assert not row.details.up.isEnabled()
    assert panel.session.load_params().devices == ("cuda:2", "cuda:0", "cuda:1")


def test_a_reserve_stays_free(panel: WiredPanel) -> None:
    """The row counts it, the engine gets it, and the bar draws it at its end."""
    row = panel.rows[0]
    row.more.click()
    row.details.reserve.setValue(2048)
    settle()
    assert panel.session.load_params().reserve == (("cuda:0", 2 << 30),)
    assert "kept free 2.0 GiB" in row.memory_bar.accessibleDescription()
    free = 24 - 10 * 3 / 8 - 2 * 3 / 8 - 500 / 1024 - 2
    assert f"{free:.1f} free" in row.use.accessibleName()
    image = row.memory_bar.grab().toImage()
    at_end = {
        image.pixelColor(image.width() - x, y).name()
        for x in range(2, 12) for y in range(image.height())
    }  # fmt: skip
    assert at_end != {theme().raised}
    row.details.reserve.setValue(23 * 1024)
    settle()
    assert "available after keeping 23.0 GiB free, 4.0 GiB short." in texts(panel)


def test_bytes_are_told_by_kind(panel: WiredPanel, qapp: QApplication) -> None:
    """An open row lists them in the colours of its bar."""
    row = panel.rows[0]
    row.more.click()
    settle()
    shown = row.details.kinds.text().replace("&nbsp;", " ")
    assert "weights 3.8 GiB" in shown
    assert "KV cache 768 MiB" in shown
    assert theme().device_colour(0) in shown
    before = row.details.kinds.text()
    apply_theme(qapp, "light")
    assert row.details.kinds.text() != before
    row.more.click()
    assert not row.details.isVisible()


def test_all_that_takes_the_focus_has_a_name_of_its_own(panel: WiredPanel) -> None:
    """This includes open details: otherwise fields of several devices could not be told apart."""
    panel.header.mode_button("groups").click()
    for row in panel.rows:
        row.more.click()
    settle()
    names = [
        widget.accessibleName() or getattr(widget, "text", str)()
        for widget in panel.findChildren(QWidget)
        if widget.focusPolicy() & Qt.FocusPolicy.TabFocus
        and widget.isVisible()
        and not isinstance(widget, QLineEdit)  # a part of a number field
    ]
    assert all(names)
    assert len(names) > 30
    assert len(set(names)) == len(names)


def test_the_memory_bar_is_painted_in_the_colour_of_its_device(panel: WiredPanel) -> None:
    """Each bar begins with the device's colour."""
    for index in range(3):
        image = panel.rows[index].memory_bar.grab().toImage()
        assert image.pixelColor(2, image.height() // 2).name() == theme().device_colour(index)


def test_quick_ways_fill_the_shares(panel: WiredPanel) -> None:
    """Memory counts as far as it is free now; speed is the read speed."""
    panel.header.even_requested.emit()
    assert panel.session.load_params().split == pytest.approx((1 / 3,) * 3)
    panel.session.set_snapshots([used("cuda:0", 18), used("cuda:1", 12), used("cuda:2", 6, 12)])
    panel.header.by_memory_requested.emit()
    assert panel.session.load_params().split == pytest.approx((0.25, 0.5, 0.25))
    panel.header.by_speed_requested.emit()
    assert panel.session.load_params().split == pytest.approx((0.5, 0.375, 0.125))


def test_the_planner_knows_the_free_memory(panel: WiredPanel) -> None:
    """Free memory is the total less what others use, in coarse steps."""
    panel.session.set_snapshots([used("cuda:0", 14)])
    settle()
    assert FakePlanner.free_bytes is not None
    assert FakePlanner.free_bytes["cuda:0"] == 10 * GIB
    assert FakePlanner.free_bytes["cuda:1"] == 24 * GIB
    calls = FakePlanner.calls
    panel.session.set_snapshots([used("cuda:0", 14 - 1000 / GIB)])
    settle()
    assert FakePlanner.calls == calls


def test_cpu_ranks_can_be_added_where_there_is_no_gpu(
    panel: WiredPanel, make_panel: MakePanel
) -> None:
    """On a machine with GPUs the field is not shown."""
    assert not panel.cpu_ranks.isVisible()
    cpu_panel = make_panel([CPU])
    assert cpu_panel.cpu_ranks.isVisible()
    cpu_panel.cpu_ranks.setValue(3)
    settle()
    assert cpu_panel.session.load_params().devices == ("cpu", "cpu", "cpu")
    assert [row.title.text() for row in cpu_panel.rows] == ["CPU 0", "CPU 1", "CPU 2"]
    cpu_panel.cpu_ranks.setValue(1)
    settle()
    assert cpu_panel.session.load_params().devices == ("cpu",)


def test_a_gpu_that_cannot_be_used_is_named_with_its_reason(make_panel: MakePanel) -> None:
    """It has no row, but a line says why."""
    broken = DeviceInfo(
        "cuda:0", "cuda", "NVIDIA GTX 1060", GIB, GIB, usable=False, reason="Too old."
    )
    panel = make_panel([broken, CPU], info=None)
    assert "GTX 1060: Too old." in texts(panel)
    assert panel.session.load_params().devices == ("cpu",)


def test_the_command_for_unusable_gpus_is_shown_once_and_can_be_copied(
    make_panel: MakePanel,
) -> None:
    command = 'pip install --force-reinstall "torch>=2.11" --index-url https://example.org/cu130'
    broken = [
        DeviceInfo(
            f"cuda:{n}", "cuda", name, GIB, GIB, usable=False, reason="No CUDA.", remedy=command
        )
        for n, name in enumerate(("NVIDIA RTX 4090", "NVIDIA RTX 3060"))
    ]
    panel = make_panel([*broken, CPU], info=None)
    lines = panel.unusable.text().splitlines()
    assert lines == ["RTX 4090: No CUDA.", command, "RTX 3060: No CUDA."]
    assert panel.unusable.textInteractionFlags() & Qt.TextInteractionFlag.TextSelectableByMouse
    assert panel.minimumSizeHint().width() <= 400, "the command is wrapped"


def test_what_is_not_proven_about_a_device_is_in_its_details(make_panel: MakePanel) -> None:
    note = "Tandem has not been run on AMD GPUs yet."
    card = DeviceInfo(
        "cuda:0", "cuda", "AMD Radeon RX 7900 XTX", 24 * GIB, 24 * GIB, arch="gfx1100", note=note
    )
    panel = make_panel([card, CPU], info=None)
    amd, cpu = panel.rows
    for row in (amd, cpu):
        row.more.click()
    settle()
    assert (amd.details.note.isVisible(), amd.details.note.text()) == (True, note)
    assert not cpu.details.note.isVisible()
