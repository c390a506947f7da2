"""What stands around the split panel in the running window: the map, links, plans, timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QTabBar
from pytestqt.qtbot import QtBot

from app.paths import settings_file
from app.placement.pins import Overrides, pins_of
from app.placement.presenter import PlacementPresenter, look_of, targets_of
from app.placement.views.placement_panel import PlacementPanel
from app.split.settings import RankSettings, SplitSettings
from app.theme import apply_theme
from app.widgets.buttons import IconButton
from engine import LoadParams, PlacementMap, Planner, RankTimes, TokenTimes, parse_rig
from tests.helpers.hollow import hollow_moe
from tests.helpers.shell_driver import MakeShell
from tests.helpers.tiny_gguf import tiny_gguf


@dataclass
class Picture:
    settings: SplitSettings
    colours: tuple[int, ...]


def ranks(*devices: str, off: tuple[int, ...] = ()) -> tuple[RankSettings, ...]:
    n = len(devices) - len(off)
    return tuple(
        RankSettings(device, device, i not in off, 0.0 if i in off else 1 / n)
        for i, device in enumerate(devices)
    )


class FakeSplit:
    """A split session with nothing but its settings."""

    def __init__(self, path: str, settings: SplitSettings) -> None:
        self.path, self.settings = path, settings
        self.given: list[Overrides] = []

    def load_params(self) -> LoadParams:
        return self.settings.load_params(self.path)

    def set_overrides(self, overrides: Overrides) -> None:
        self.given.append(overrides)


class Desk:
    """A map with its presenter."""

    def __init__(self, path: Path, settings: SplitSettings) -> None:
        self.split = FakeSplit(str(path), settings)
        self.panel = PlacementPanel()
        self.threads: list[str] = []
        self.presenter = PlacementPresenter(
            self.panel, self.split, self.panel, planner_factory=self._planner
        )

    def _planner(self, path: str) -> Planner:
        self.threads.append(threading.current_thread().name)
        return Planner(path)

    def tell(self, **changes: object) -> None:
        """The split panel shows other settings."""
        values = {name: getattr(self.split.settings, name) for name in ("ranks", "mode")}
        self.split.settings = SplitSettings(**(values | changes))  # type: ignore[arg-type]
        n = len(self.split.settings.ranks)
        self.presenter.set_picture(Picture(self.split.settings, tuple(range(n))))

    @property
    def owners(self) -> set[int]:
        """Ranks that hold something of block 1's experts."""
        cells = self.panel.view.table.grid.cells.values()
        found = [c for c in cells if (1, "experts") in c.parts]
        return {rank for cell in found for rank, n in enumerate(cell.ranks) if n}


@pytest.fixture
def desk(qapp: QApplication, qtbot: QtBot, tmp_path: Path) -> Iterator[Desk]:
    apply_theme(qapp, "dark")
    path = hollow_moe(tmp_path / "m.gguf", n_layer=3, n_embd=512, n_head=16, n_vocab=512)
    made = Desk(path, SplitSettings(ranks("cpu", "cpu"), "tensor"))
    qtbot.addWidget(made.panel)
    yield made
    made.presenter.close()


def test_the_map_is_made_on_a_thread_while_somebody_looks(desk: Desk, qtbot: QtBot) -> None:
    desk.tell()
    qtbot.wait(100)
    assert not desk.threads
    desk.panel.show()
    qtbot.waitUntil(lambda: desk.owners == {0, 1})
    assert desk.threads == ["tandem-map"], "and the file is opened once"
    desk.tell(mode="layer")
    qtbot.waitUntil(lambda: desk.owners == {0})
    assert len(desk.threads) == 1


def test_a_pin_becomes_an_override_beside_the_others(desk: Desk, qtbot: QtBot) -> None:
    desk.tell(overrides=((r"^blk\.0\.attn_", "#0"),))
    desk.panel.show()
    qtbot.waitUntil(lambda: bool(desk.owners))
    desk.panel.pin_requested.emit("#1", frozenset({(1, "experts")}))
    assert pins_of(desk.split.given[-1]) == {(0, "attention"): "#0", (1, "experts"): "#1"}
    desk.tell(overrides=desk.split.given[-1])
    qtbot.waitUntil(lambda: desk.owners == {1})
    desk.panel.unpin_requested.emit(frozenset({(1, "experts")}))
    assert pins_of(desk.split.given[-1]) == {(0, "attention"): "#0"}
    qtbot.mouseClick(desk.panel.unpin_all, Qt.MouseButton.LeftButton)
    assert desk.split.given[-1] == ()


def test_a_split_that_cannot_be_made_is_a_sentence_with_a_way_out(desk: Desk, qtbot: QtBot) -> None:
    """A rank that was pinned to is gone."""
    desk.tell(overrides=((r"^blk\.0\.attn_", "#5"),))
    desk.panel.show()
    qtbot.waitUntil(lambda: "names a rank that does not exist" in desk.panel.hint.text())
    assert desk.panel.unpin_all.isVisible()
    desk.panel.unpin_all.click()
    assert desk.split.given == [()]


def test_without_a_model_the_map_is_empty(desk: Desk, qtbot: QtBot) -> None:
    desk.tell()
    desk.panel.show()
    qtbot.waitUntil(lambda: bool(desk.owners))
    desk.split.path = ""
    desk.tell()
    qtbot.waitUntil(lambda: not desk.panel.view.isVisible())


def test_ranks_and_other_devices_can_be_pinned_to() -> None:
    """A device that stands for several ranks is named by rank; one that is off by its id."""
    settings = SplitSettings(ranks("cuda:0", "cuda:1", "cpu", off=(1,)), "tensor")
    picture = Picture(settings, (0, 1, 2))
    assert [(t.override, t.label, t.colour) for t in targets_of(picture)] == [
        ("cuda:0", "GPU 0", 0), ("cpu", "CPU 0", 2), ("cuda:1", "GPU 1", 1),
    ]  # fmt: skip
    virtual = Picture(SplitSettings(ranks("cpu", "cpu"), "tensor"), (0, 1))
    assert [t.override for t in targets_of(virtual)] == ["#0", "#1"]
    look = look_of(picture, ("cuda:0", "cpu", "cuda:1"))
    assert look.colours == (0, 2, 1)
    assert look.labels == ("GPU 0", "CPU 0", "GPU 1")


def test_every_target_is_understood_by_the_engine(desk: Desk) -> None:
    for n in (1, 2, 3):
        settings = SplitSettings(ranks(*["cpu"] * n), "tensor" if n > 1 else "single")
        for target in targets_of(Picture(settings, tuple(range(n)))):
            params = settings.load_params(desk.split.path)
            pinned = LoadParams(
                params.path, params.devices, overrides=((r"^blk\.1\.attn_", target.override),)
            )
            assert isinstance(Planner(params.path).placement(pinned), PlacementMap)


# in the window


def rail(shell: object, name: str) -> IconButton:
    window = shell.window  # type: ignore[attr-defined]
    found = [b for b in window._rail.findChildren(IconButton) if b.accessibleName() == name]
    (made,) = found
    return made


def test_the_rail_opens_the_map_and_the_links(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    """Each as a page of the right dock, remembered over a restart."""
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
