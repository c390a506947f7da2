"""The side panels in the running window: map, links, plans, timeline."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PySide6.QtWidgets import QTabBar
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.devices.map.grid import pins_of
from app.widgets.buttons import IconButton
from engine import DeviceInfo, RankTimes, TokenTimes, parse_rig
from tests.helpers.shell_driver import MakeShell
from tests.helpers.tiny_gguf import tiny_gguf


def rail(shell: object, name: str) -> IconButton:
    window = shell.window  # type: ignore[attr-defined]
    found = [b for b in window._rail.findChildren(IconButton) if b.accessibleName() == name]
    (made,) = found
    return made


def test_the_rail_opens_the_map_and_the_links(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    """Each as a tab of the right dock, restored after a restart."""
    path = str(tiny_gguf(tmp_path / "m.gguf", n_layer=2))
    shell = make_shell(model=path)
    window, side_panels = shell.window, shell.side_panels
    assert not side_panels.placement.isVisible()
    rail(shell, "Tensor map").click()
    qtbot.waitUntil(lambda: side_panels.placement.view.isVisible())
    assert side_panels.placement.view.table.grid.rows == ("emb", "0", "1", "head")
    rail(shell, "Links between devices").click()
    qtbot.waitUntil(lambda: side_panels.links.table.model().rowCount() > 0)
    assert side_panels.links.isVisible()
    window.close()
    assert settings_file().exists()
    again = make_shell()
    assert not again.window.links_dock.isHidden()
    assert not again.window.placement_dock.isHidden()


def test_pinning_changes_the_split_and_can_be_undone(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    shell = make_shell(model=str(tiny_gguf(tmp_path / "m.gguf", n_layer=2)))
    shell.split_panel.cpu_ranks.setValue(2)
    rail(shell, "Tensor map").click()
    panel = shell.side_panels.placement
    qtbot.waitUntil(lambda: len(panel.chips.chips) == 2)
    panel.pin_requested.emit("#1", frozenset({(0, "ffn")}))
    assert pins_of(shell.split.load_params().overrides) == {(0, "ffn"): "#1"}
    qtbot.waitUntil(lambda: any(c.is_pinned for c in panel.view.table.grid.cells.values()))
    shell.split.undo()
    assert shell.split.load_params().overrides == ()


def test_the_plan_menu_stands_in_the_title_of_the_split(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    shell = make_shell()
    menu = shell.side_panels.plans
    assert not menu.isEnabled(), "no model"
    assert shell.window.split_dock.titleBarWidget().isAncestorOf(menu)
    shell.models.open(str(tiny_gguf(tmp_path / "m.gguf")))
    qtbot.waitUntil(menu.isEnabled)
    menu.save_requested.emit("Mine")
    qtbot.waitUntil(lambda: menu.button.text() == "Mine ▾")
    shell.split_panel.cpu_ranks.setValue(2)
    qtbot.waitUntil(lambda: menu.button.text() == "Not saved ▾")
    menu.chosen.emit("Mine")
    qtbot.waitUntil(lambda: menu.button.text() == "Mine ▾")
    assert len(shell.split.load_params().devices) == 1


def test_the_timeline_knows_the_ranks_of_the_loaded_model(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    shell = make_shell(model=str(tiny_gguf(tmp_path / "m.gguf")))
    shell.monitor.add_times(TokenTimes(3, 0.01, (RankTimes(0.008, 0.001),)))
    qtbot.waitUntil(lambda: shell.monitor.timeline.isVisible(), timeout=5000)
    shell.models.eject()
    qtbot.waitUntil(lambda: not shell.monitor.timeline.isVisible(), timeout=5000)


def test_no_tab_bar_is_left_in_a_corner(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    """Restoring a layout makes Qt forget some."""
    shell = make_shell()
    for dock in (shell.window.placement_dock, shell.window.links_dock):
        shell.window.show_dock(dock, True)
    shell.window.close()
    window = make_shell().window

    def shown() -> list[int]:
        return [bar.count() for bar in window.findChildren(QTabBar) if bar.isVisible()]

    qtbot.waitUntil(lambda: shown() == [3])


def test_simulated_devices_have_links_but_no_search(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    side_panels = shell.side_panels
    rig = parse_rig("2xA100")
    side_panels.set_devices(rig.devices, rig)
    shell.window.show_dock(shell.window.links_dock, True)
    qtbot.waitUntil(lambda: side_panels.links.table.model().rowCount() == 2 + 4)
    assert not side_panels.links.measure.isEnabled()
    assert not side_panels.find.isEnabled()


def test_the_drivers_are_not_asked_again_for_the_plans(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening them takes some GPUs a while, which would block the window."""
    shell = make_shell()
    asked: list[str] = []

    def list_devices(*, wait: bool = True) -> list[DeviceInfo]:
        asked.append(threading.current_thread().name)
        return []

    qtbot.waitUntil(lambda: not shell.start_up._search.is_busy)
    monkeypatch.setattr("engine.list_devices", list_devices)
    shell.models.open(str(tiny_gguf(tmp_path / "m.gguf", n_layer=2)))
    qtbot.waitUntil(lambda: shell.client.model is not None)
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.side_panels._plans.refresh()
    assert shell.side_panels._plans._devices == list(shell.start_up.devices)
    assert asked == []
