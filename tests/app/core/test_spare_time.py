"""Work of the window's thread between its events."""

from collections.abc import Iterator

import pytest
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.process.spare_time import LaterSteps, SpareTime, spare_time


class Noted:
    """Work that notes its steps."""

    def __init__(self, name: str, n_steps: int, notes: list[str]) -> None:
        self._name, self._n_steps, self._notes = name, n_steps, notes

    def steps(self) -> Iterator[None]:
        for _ in range(self._n_steps):
            self._notes.append(self._name)
            yield


@pytest.fixture
def spare(qapp: QApplication) -> Iterator[SpareTime]:
    made = SpareTime()
    yield made
    made.close()


def test_one_work_is_done_after_the_other(qtbot: QtBot, spare: SpareTime) -> None:
    notes: list[str] = []
    first, second, last = QObject(), QObject(), QObject()
    spare.do(last, Noted("last", 2, notes).steps(), is_last=True)
    spare.do(first, Noted("first", 2, notes).steps())
    spare.do(second, Noted("second", 2, notes).steps())
    qtbot.waitUntil(lambda: not spare.has_work_of(last))
    assert notes == ["first"] * 2 + ["second"] * 2 + ["last"] * 2
    qtbot.waitUntil(lambda: not spare._timer.isActive())


def test_a_turn_ends_with_its_slice(spare: SpareTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.core.process.spare_time.SLICE_S", 0.0)
    notes: list[str] = []
    owner = QObject()
    spare.do(owner, Noted("step", 3, notes).steps())
    for n_steps in (1, 2, 3):
        spare._turn()
        assert len(notes) == n_steps


def test_work_of_what_has_gone_is_dropped(qtbot: QtBot, spare: SpareTime) -> None:
    notes: list[str] = []
    owner, other = QObject(), QObject()
    spare.do(owner, Noted("gone", 1000, notes).steps())
    spare.do(other, Noted("old", 1000, notes).steps())
    spare.do(other, Noted("new", 1, notes).steps())
    owner.deleteLater()
    qtbot.waitUntil(lambda: not spare._timer.isActive())
    assert "old" not in notes
    assert notes[-1] == "new"
    assert notes.count("gone") < 1000


def test_later_steps_go_on_until_they_are_stopped(qtbot: QtBot) -> None:
    notes: list[int] = []
    parent = QObject()

    def step() -> None:
        notes.append(len(notes))
        if len(notes) == 5:
            steps.stop()

    steps = LaterSteps(step, parent)
    steps.start()
    steps.start()
    assert steps.is_active
    qtbot.waitUntil(lambda: not steps.is_active)
    assert notes == [0, 1, 2, 3, 4]
    steps.start()
    steps.stop()
    assert not spare_time().has_work_of(steps)
