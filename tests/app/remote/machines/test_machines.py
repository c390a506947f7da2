"""Other machines in the window: who joins, their devices, and the host over all of them."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

import engine
from app.remote.machines import part as part_module
from app.remote.machines.part import MachinesPart
from app.remote.machines.team import MachineTeam, TeamHost, for_machines, for_window
from engine import (
    AnswerRequest,
    Command,
    EngineError,
    Failed,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
    SplitError,
    WiresMeasured,
    WireSpeed,
)
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.tiny_gguf import tiny_gguf

LINKED = WiresMeasured(("here", "there"), (WireSpeed(0, 1, 1e-3, 1e-3, 1e8, 2e-3),))


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf"))


def join(team: MachineTeam) -> threading.Thread:
    """Have a machine join as the command of a team says."""
    found = re.fullmatch(r"TANDEM_TOKEN=(\S+) tandem join (\S+):(\d+)", team.command)
    assert found is not None
    request = engine.JoinRequest(found[2], int(found[3]), found[1], ("cpu",))
    joining = threading.Thread(target=engine.join_machines, args=(request, lambda _: None))
    joining.start()
    return joining


def test_devices_of_a_team_have_its_machines_in_their_ids(path: str) -> None:
    team = MachineTeam()
    team.open(path, 2, "127.0.0.1:0")
    assert (team.devices, team.states, team.is_complete) == ((), [], False)
    joining = join(team)
    until(lambda: bool(team.states))
    assert "1/cpu" in [device.id for device in team.devices]
    assert "1/cpu" in [state.device for state in team.states]
    assert team.status.endswith("has joined.")
    assert team.check(path).is_complete
    with pytest.raises(EngineError, match="joined to run"):
        team.check("/models/other.gguf")
    team.close()
    joining.join(20)
    assert not joining.is_alive()
    assert (team.devices, team.command) == ((), "")
    with pytest.raises(EngineError, match="have disconnected"):
        team.check(path)


def test_parameters_are_those_that_machines_understand() -> None:
    asked = LoadParams("m", ("cuda:0", "cuda:1", "1/cuda:0"), split_mode="groups", groups=(2, 1))
    found = for_machines(asked, 2)
    assert (found.devices, found.machines) == (("cuda:0", "cuda:1", "cuda:0"), (2, 1))
    assert for_window(found) == asked
    alone = LoadParams("m", ("cpu",))
    assert for_window(alone) == alone
    for devices in (("1/cpu", "cpu"), ("cpu", "1/cpu", "cpu")):
        with pytest.raises(SplitError, match="must be adjacent"):
            for_machines(LoadParams("m", devices), 2)


def test_machines_that_are_left_out_have_a_rank_without_a_share() -> None:
    alone = LoadParams("m", ("1/cuda:0", "1/cuda:1"), (1.0, 3.0), overrides=(("ffn", "#1"),))
    found = for_machines(alone, 3)
    assert found.devices == ("cpu", "cuda:0", "cuda:1", "cpu")
    assert (found.machines, found.split) == ((1, 2, 1), (0.0, 1.0, 3.0, 0.0))
    assert found.overrides == (("ffn", "#2"),)
    assert for_window(found) == alone

    inside = LoadParams(
        "m", ("cuda:0", "2/cuda:0", "2/cuda:1"), (1.0, 1.0, 1.0), split_mode="groups", groups=(2, 1)
    )
    found = for_machines(inside, 3)
    assert (found.devices, found.groups) == (("cuda:0", "cpu", "cuda:0", "cuda:1"), (3, 1))
    assert for_window(found) == inside
    apart = replace(inside, groups=(1, 2))
    assert for_machines(apart, 3).groups == (1, 1, 2)
    assert for_window(for_machines(apart, 3)) == apart
    with pytest.raises(SplitError, match="can only go to a CPU"):
        for_machines(LoadParams("m", ("1/cuda:0",), n_cpu_blocks=2), 2)


class Inner(FakeHost):
    """A host over machines that have joined, in place of the real one."""

    made: "list[Inner]" = []  # noqa: RUF012 of one test each
    n_begun = 0

    def __init__(self, on_event: Callable[[HostEvent], None], *_: object) -> None:
        super().__init__(on_event, Script())
        self.made.append(self)

    def begin(self) -> None:
        self.n_begun += 1
        self._on_event(HostEvent(0, LINKED))


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Inner]]:
    monkeypatch.setattr(engine, "MachinesHost", Inner, raising=False)
    Inner.made = []
    yield Inner.made
    Inner.made = []


def test_a_team_computes_what_it_has_joined_for(path: str, inner: list[Inner]) -> None:
    team, events = MachineTeam(), list[HostEvent]()
    host = TeamHost(events.append, team)
    load = Load(LoadParams(path, ("cpu", "1/cpu"), split_mode="groups", groups=(1, 1)))

    def closing(command: Command) -> object:
        number = host.submit(command)
        until(lambda: any(one.command_id == number for one in events))
        return next(one.event for one in events if one.command_id == number)

    refused = closing(load)
    assert isinstance(refused, Failed)
    assert "have disconnected" in refused.error.message
    assert isinstance(closing(AnswerRequest()), Failed), "there is no model"
    team.open(path, 2, "127.0.0.1:0")
    joining = join(team)
    until(lambda: team.is_complete)
    host.begin()
    assert team.linked == LINKED
    assert not any(isinstance(one.event, WiresMeasured) for one in events), "it is the team's"
    number = host.submit(load)
    until(lambda: any(isinstance(one.event, ModelLoaded) for one in events))
    loaded = next(one for one in events if isinstance(one.event, ModelLoaded))
    assert loaded.command_id == number
    assert isinstance(loaded.event, ModelLoaded)
    assert loaded.event.params.devices == ("cpu", "1/cpu")
    (command,) = [one for one in inner[0].commands if isinstance(one, Load)]
    assert (command.params.devices, command.params.machines) == (("cpu", "cpu"), (1, 1))
    host.leave()
    assert isinstance(events[-1].event, Failed)
    assert events[-1].event.is_model_lost
    team.close()
    joining.join(20)


def test_a_command_that_is_refused_at_once_is_closed_by_its_number(path: str) -> None:
    team, events = MachineTeam(), list[HostEvent]()
    host = TeamHost(events.append, team)
    team.open(path, 2, "127.0.0.1:0")
    number = host.submit(Load(LoadParams(path, ("cpu", "1/cpu"), split_mode="groups")))
    assert [one.command_id for one in events] == [number]
    assert isinstance(events[0].event, Failed)
    assert "is waiting for 1 more machine" in events[0].event.error.message
    host.close()
    team.close()


def test_the_dialog_shows_who_joins(
    qtbot: QtBot, path: str, inner: list[Inner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "_addresses", lambda: ["127.0.0.1:0"])
    window, chosen = QWidget(), [""]
    qtbot.addWidget(window)
    found = MachinesPart(lambda: chosen[0], window, window)
    host = found.make_host(lambda _: None)
    found.open()
    dialog = found.dialog
    assert dialog is not None
    dialog.switch.click()
    assert dialog.status.text() == "Choose a model first."
    chosen[0] = path
    with qtbot.waitSignal(found._job.done, timeout=10_000):
        dialog.switch.click()
    qtbot.waitUntil(lambda: "tandem join 127.0.0.1:" in dialog.command.text())
    assert dialog.status.text() == "Waiting for 1 more."
    joining = join(found.team)
    with qtbot.waitSignal(found.changed, timeout=20_000):
        pass
    qtbot.waitUntil(lambda: found.wires is not None, timeout=10_000)
    qtbot.waitUntil(lambda: len(dialog) == 1)
    qtbot.waitUntil(lambda: dialog.table.model().index(0, 4).data() == "1.00 ms", timeout=10_000)
    assert dialog.status.text().startswith("All machines have joined.")
    assert inner[0].n_begun == 1
    with qtbot.waitSignal(found._job.done, timeout=10_000):
        dialog.switch.click()
    qtbot.waitUntil(lambda: not dialog.command.text())
    assert len(dialog) == 0
    joining.join(20)
    assert not joining.is_alive()
    host.close()
    found.close()


def test_an_address_of_another_machine_is_refused(qtbot: QtBot, path: str) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    found = MachinesPart(lambda: path, window, window)
    found.open()
    assert found.dialog is not None
    found.dialog.address.setCurrentText("192.0.2.1:0")
    with qtbot.waitSignal(found._job.failed, timeout=10_000):
        found.dialog.switch.click()
    found._timer.timeout.emit()
    assert "No other machine can join at 192.0.2.1:0" in found.dialog.status.text(), "it stays"
    assert found.dialog.switch.isEnabled()
    found.close()


def test_files_are_told_apart_by_their_place(path: str, tmp_path: Path) -> None:
    team = MachineTeam()
    with pytest.raises(EngineError):
        team.open(str(tmp_path / "none.gguf"), 2, "127.0.0.1:0")
    assert team.gathering is None
