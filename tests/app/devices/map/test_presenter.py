"""The map's presenter: maps on a thread, pins as overrides, targets for pins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.map.grid import Overrides, pins_of
from app.devices.map.map_presenter import PlacementPresenter, look_of, targets_of
from app.devices.map.views.panel import PlacementPanel
from app.devices.split.settings import RankSettings, SplitSettings
from app.widgets.theme import apply_theme
from engine import LoadParams, PlacementMap, Planner
from tests.helpers.hollow import hollow_moe


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
        """Show the map of changed settings."""
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
    """The target of a pin is gone."""
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
    """Several ranks of one device are named by number; a device that is off by its id."""
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
