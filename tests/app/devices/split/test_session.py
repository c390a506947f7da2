"""The split's session: no widget is needed to choose, to plan and to ask for a load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.split.figures import SplitPicture
from app.devices.split.session import SplitSession
from engine import LoadParams
from tests.helpers.fake_planner import CPU, GPUS, INFO, FakePlanner, fake_machine
from tests.helpers.split_panels import loaded_as, settle, used


@pytest.fixture
def session(qapp: QApplication) -> Iterator[SplitSession]:
    """Return a session with three GPUs, the CPU, and a model that can be loaded."""
    made = SplitSession(FakePlanner, fake_machine)
    made.set_devices([*GPUS, CPU])
    made.set_model(INFO)
    made.set_state("ready")
    settle()
    yield made
    made.stop()


def test_changes_of_one_turn_are_one_picture(session: SplitSession) -> None:
    """The last position of a drag counts."""
    pictures: list[SplitPicture] = []
    session.pictured.connect(pictures.append)
    for n in range(20):
        session.drag(0, 0.2 + n / 100)
    session.set_overrides((("^output", "cpu"),))
    settle()
    assert len(pictures) == 1
    assert pictures[-1].settings == session.settings
    assert session.settings.boundary(0) == pytest.approx(3 / 8, abs=0.06)
    assert session.load_params().overrides == (("^output", "cpu"),)


def test_a_reading_that_changes_nothing_to_be_seen_makes_no_picture(session: SplitSession) -> None:
    """A window that does nothing reads its devices all the time."""
    pictures: list[SplitPicture] = []
    session.set_snapshots([used("cuda:0", 10)])
    settle()
    session.pictured.connect(pictures.append)
    for step in range(60):  # there and back, as a machine with other programs
        session.set_snapshots([used("cuda:0", 10 + step % 4 / 64)])
    settle()
    assert pictures == []
    session.set_snapshots([used("cuda:0", 10.1)])
    settle()
    assert len(pictures) == 1
    session.set_snapshots([replace(used("cuda:0", 10.1), temperature_c=60.0)])
    settle()
    assert len(pictures) == 2


def test_small_changes_of_memory_are_shown_every_few_readings(session: SplitSession) -> None:
    """Other programs change some of it all the time; what is large is shown at once."""
    session.set_snapshots([used("cuda:0", 10)])
    settle()
    pictures: list[SplitPicture] = []
    session.pictured.connect(pictures.append)
    counts = []
    for step in range(1, 9):
        session.set_snapshots([used("cuda:0", 10 + step / 10)])
        settle()
        counts.append(len(pictures))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2]
    session.set_snapshots([used("cuda:0", 12)])
    settle()
    assert len(pictures) == 3


def test_a_load_is_asked_for_as_the_state_allows(session: SplitSession, qtbot: QtBot) -> None:
    """It loads at first, later applies live where possible, and does nothing during a load."""
    asked: list[str] = []
    session.load_requested.connect(lambda: asked.append("load"))
    session.apply_requested.connect(lambda: asked.append("apply"))
    session.request_load()
    assert asked == ["load"]
    session.set_state("loading")
    settle()
    session.request_load()
    session.set_loaded(loaded_as(session.load_params()))
    settle()
    session.request_load()
    assert asked == ["load"], "there is nothing to change"
    session.split_by_speed()
    settle()
    session.request_load()
    assert asked == ["load", "apply"]
    with qtbot.waitSignal(session.settings_changed):
        session.choose(LoadParams(INFO.path, ("cuda:0",), n_ctx=4096))
    settle()
    session.request_load()
    assert asked == ["load", "apply", "load"], "another context needs a reload"


def test_what_the_person_does_can_be_undone_but_what_is_suggested_cannot(
    session: SplitSession,
) -> None:
    before = session.load_params()
    session.begin_gesture()
    session.drag(0, 0.25)
    settle()
    session.drag(0, 0.5)
    session.end_gesture()
    after = session.load_params()
    assert after != before
    session.undo()
    assert session.load_params() == before
    session.redo()
    assert session.load_params() == after
    session.restore(session.to_dict())
    session.undo()
    assert session.load_params().split == pytest.approx(after.split)
