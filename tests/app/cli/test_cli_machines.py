"""`tandem serve --nodes`: the first load, during which machines may be lost."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.server import serve as serving
from app.cli.server.serve import ServerRun
from engine import MachineLost

LOADED: Any = object()


class Machines:
    """Machines of which one is missing when it is asked for the first time after each loss."""

    def __init__(self, *, is_there: bool) -> None:
        self.n_looks, self._is_there = 0, is_there

    @property
    def problem(self) -> str:
        self.n_looks += 1
        return "" if self._is_there or self.n_looks % 2 == 0 else "one is missing"


def first_load(machines: Machines | None, n_failures: int) -> object:
    """Load a model whose first loads fail as a machine is lost."""
    n_left = n_failures

    async def load(on_progress: object) -> object:
        nonlocal n_left
        if not n_left:
            return LOADED
        n_left -= 1
        raise MachineLost("b is gone.", "The model is loaded again once all machines are there.")

    run: Any = SimpleNamespace(_machines=machines)
    model: Any = SimpleNamespace(load=load)
    return asyncio.run(ServerRun._load(run, model))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOST_S", 0.0)
    monkeypatch.setattr(serving, "LOOK_S", 0.0)


def test_a_machine_that_is_lost_in_the_first_load_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = Machines(is_there=False)
    assert first_load(machines, 5) is LOADED
    assert machines.n_looks == 10
    assert capsys.readouterr().err.count("loaded again once all machines are there") == 5


def test_a_load_that_always_fails_ends_though_all_machines_are_there() -> None:
    assert first_load(Machines(is_there=True), serving.MAX_TRIES - 1) is LOADED
    with pytest.raises(MachineLost, match="b is gone"):
        first_load(Machines(is_there=True), serving.MAX_TRIES)
    with pytest.raises(MachineLost):
        first_load(None, 1)
