"""Saved plans in the window: chosen, saved, renamed, deleted, exported; badges from answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QFileDialog, QInputDialog
from pytestqt.qtbot import QtBot

from app.core.notice import Notice
from app.devices.split.saved_plans import PlanEntry, PlanMenu, PlansPresenter
from engine import (
    DeviceInfo,
    Finished,
    LoadParams,
    ModelInfo,
    PlanBadge,
    PlanStore,
    SavedPlan,
    Timings,
    Usage,
    model_key,
    read_model_info,
)
from tests.helpers.fake_host import model_loaded
from tests.helpers.tiny_gguf import tiny_gguf

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "Ryzen", 32 * GIB, 30 * GIB, n_cores=8)


class FakeSplit:
    """A split session with nothing but its choice."""

    def __init__(self, params: LoadParams) -> None:
        self.params = params
        self.chosen: list[LoadParams] = []

    def load_params(self) -> LoadParams:
        return self.params

    def choose(self, params: LoadParams) -> None:
        self.params = params
        self.chosen.append(params)


class Desk:
    """A plan menu with its presenter and what both need."""

    def __init__(self, qtbot: QtBot, path: Path, folder: Path) -> None:
        self.info: ModelInfo = read_model_info(path)
        self.key = model_key(path)
        self.store = PlanStore(folder)
        self.split = FakeSplit(LoadParams(str(path), ("cpu", "cpu"), (3.0, 1.0), n_ctx=64))
        self.menu = PlanMenu()
        qtbot.addWidget(self.menu)
        self.notices: list[Notice] = []
        self.presenter = PlansPresenter(
            self.menu, self.split, lambda params: f"tandem {params.n_ctx}",
            self.menu, store=lambda: self.store, devices=lambda: [CPU],
        )  # fmt: skip
        self.presenter.noticed.connect(self.notices.append)

    def save(self, name: str, speed: float = 0.0, **changes: object) -> None:
        params = replace(self.split.params, **changes)  # type: ignore[arg-type]
        badge = PlanBadge(10 * speed, speed, 64, "2026-01-01T00:00:00Z") if speed else None
        self.store.save(self.key, SavedPlan.of(name, params, [CPU], badge))

    @property
    def names(self) -> list[str]:
        return [plan.name for plan in self.store.plans(self.key)]

    def open(self) -> dict[str, QAction]:
        """Return the menu's entries by text; entries of submenus have a slash."""
        self.menu.menu.aboutToShow.emit()
        found = {}
        for action in self.menu.menu.actions():
            found[action.text()] = action
            if action.menu() is not None:
                found |= {f"{action.text()}/{a.text()}": a for a in action.menu().actions()}
        return found


@pytest.fixture
def desk(qapp: QApplication, qtbot: QtBot, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(qtbot, tiny_gguf(tmp_path / "m.gguf"), tmp_path / "plans")
    made.presenter.set_model(made.info)
    qtbot.waitUntil(made.menu.isEnabled)
    yield made
    made.presenter.close()


def test_the_button_names_the_plan_in_use(desk: Desk) -> None:
    desk.save("Long & slow")
    desk.presenter.refresh()
    assert desk.menu.button.text() == "Long && slow ▾"
    assert desk.menu.button.accessibleName() == "Plan: Long & slow"
    desk.split.params = replace(desk.split.params, n_ctx=32)
    desk.presenter.show_current()
    assert desk.menu.button.text() == "Not saved ▾"


def test_the_menu_shows_measured_speeds_and_what_cannot_be_used(desk: Desk) -> None:
    desk.save("Fast", 61.84)
    desk.save("Elsewhere", devices=("cuda:3",), split=None)
    actions = desk.open()
    assert actions["Fast\t61.8 tok/s"].isChecked()
    assert actions["Fast\t61.8 tok/s"].isEnabled()
    assert not actions["Elsewhere"].isEnabled()
    assert "cuda:3, which is not available" in actions["Elsewhere"].toolTip()


def test_a_plan_that_is_chosen_reaches_the_split_panel(desk: Desk) -> None:
    desk.save("Short", n_ctx=16)
    desk.open()["Short"].trigger()
    (chosen,) = desk.split.chosen
    assert (chosen.path, chosen.n_ctx, chosen.devices) == (desk.info.path, 16, ("cpu", "cpu"))
    assert desk.menu.button.text() == "Short ▾"


def test_without_plans_only_keeping_one_is_offered(desk: Desk) -> None:
    assert [text for text in desk.open() if text] == ["Save as…", "Import…", "Copy as command"]


def test_saving_keeps_what_is_chosen_now(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("  Mine ", True))
    desk.open()["Save as…"].trigger()
    assert desk.names == ["Mine"]
    assert desk.menu.button.text() == "Mine ▾"
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("Other", False))
    desk.open()["Save as…"].trigger()
    assert desk.names == ["Mine"], "cancelled"


def test_a_name_that_cannot_be_used_is_a_banner(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("auto", True))
    desk.open()["Save as…"].trigger()
    assert desk.notices[-1].text == "'auto' cannot be the name of a plan."
    assert desk.notices[-1].kind == "error"


def test_renaming_keeps_plan_and_badge(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.save("Old", 20.0)
    desk.save("Taken", n_ctx=8)
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("New", True))
    desk.open()["Rename/Old"].trigger()
    assert desk.names == ["New", "Taken"]
    badge = desk.store.find(desk.key, "New").badge
    assert badge is not None
    assert badge.decode_ts == 20.0
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("taken", True))
    desk.open()["Rename/New"].trigger()
    assert desk.names == ["New", "Taken"]
    assert "already" in desk.notices[-1].text


def test_only_the_letters_of_a_name_can_be_changed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that differ only in case are the same plan."""
    desk.save("fast")
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("Fast", True))
    desk.open()["Rename/fast"].trigger()
    assert desk.names == ["Fast"]


def test_deleting_can_be_undone(desk: Desk) -> None:
    desk.save("Gone", 20.0)
    desk.open()["Delete/Gone"].trigger()
    assert desk.names == []
    notice = desk.notices[-1]
    assert notice.action == "Undo"
    assert notice.on_action is not None
    notice.on_action()
    assert desk.names == ["Gone"]


def test_a_plan_goes_to_a_file_and_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    desk.save("Mine", n_ctx=16)
    file = tmp_path / "mine.json"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(file), ""))
    desk.open()["Export/Mine"].trigger()
    assert json.loads(file.read_text())["name"] == "Mine"
    desk.store.delete(desk.key, "Mine")
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(file), ""))
    desk.open()["Import…"].trigger()
    assert desk.names == ["Mine"]
    file.write_text("no JSON")
    desk.open()["Import…"].trigger()
    assert desk.notices[-1].kind == "error"
    assert "is not a plan" in desk.notices[-1].text


def test_the_command_is_on_the_clipboard(desk: Desk, qapp: QApplication) -> None:
    desk.open()["Copy as command"].trigger()
    assert qapp.clipboard().text() == "tandem 64"


def test_the_fastest_that_fits_is_found_on_a_thread(desk: Desk, qtbot: QtBot) -> None:
    desk.save("Slow", 5.0, n_ctx=16)
    desk.save("Fast", 50.0, n_ctx=32)
    desk.save("Elsewhere", 500.0, devices=("cuda:3",), split=None)
    desk.open()["Fastest that fits"].trigger()
    qtbot.waitUntil(lambda: bool(desk.split.chosen))
    assert desk.split.chosen[0].n_ctx == 32


def test_an_answer_gives_its_plan_a_badge(desk: Desk, qtbot: QtBot) -> None:
    """Short answers and answers of other settings give none."""
    desk.save("Mine")
    desk.presenter.refresh()
    loaded = replace(model_loaded(desk.split.params), n_ctx=64)
    times = Timings(0.1, 1.0, 0.1, 200.0, 61.8)
    desk.presenter.note_answer(Finished("stop", Usage(20, 0, 3), times), loaded)
    desk.presenter.note_answer(Finished("stop", Usage(20, 0, 99), times), None)
    assert desk.store.find(desk.key, "Mine").badge is None
    desk.presenter.note_answer(Finished("stop", Usage(20, 0, 99), times), loaded)
    qtbot.waitUntil(lambda: desk.store.find(desk.key, "Mine").badge is not None)
    badge = desk.store.find(desk.key, "Mine").badge
    assert badge is not None
    assert (badge.decode_ts, badge.prefill_ts, badge.n_ctx) == (61.8, 200.0, 64)
    assert Finished("stop", Usage(20, 0, 99, 8, 4), replace(times, saved_s=1.0)).plain_per_s == 30.9
    assert Finished("stop", Usage(20, 0, 99, 8, 4), times).plain_per_s == 0.0, "it is unknown"
    qtbot.waitUntil(lambda: "Mine\t61.8 tok/s" in desk.open())


def test_another_model_has_other_plans(desk: Desk, qtbot: QtBot, tmp_path: Path) -> None:
    desk.save("Mine")
    desk.presenter.refresh()
    other = read_model_info(tiny_gguf(tmp_path / "other.gguf", n_layer=3))
    desk.presenter.set_model(other)
    assert not desk.menu.isEnabled(), "until it is known which model that is"
    qtbot.waitUntil(desk.menu.isEnabled)
    assert "Mine" not in desk.open()


def test_long_names_do_not_widen_the_dock(qtbot: QtBot) -> None:
    menu = PlanMenu()
    qtbot.addWidget(menu)
    menu.set_plans([PlanEntry("x" * 90)], "x" * 90)
    assert len(menu.button.text()) < 30
    assert menu.button.toolTip() == "x" * 90
