"""A few rounds of each campaign; hundreds of them on demand, see `tests.soak`.

A window and its engine take seconds to start on a busy machine, so each campaign has the rounds
that fail most easily each time, and one of every kind behind `-m slow`. A window that survives its
engine is in `tests/app/window/test_recovery.py` as well.
"""

import sys
from pathlib import Path

import pytest

from tests.soak.campaign import Campaign
from tests.soak.engine_kills import EngineKills
from tests.soak.installer_kills import InstallerKills
from tests.soak.machine_faults import MachineFaults
from tests.soak.poisoned_engine import PHASES, POISONS, PoisonedEngine
from tests.soak.signal_matrix import SignalMatrix
from tests.soak.window_kills import WindowKills

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it sends signals and reads /proc"),
    pytest.mark.timeout(1800),
]


def run(campaign: Campaign, n_rounds: int) -> None:
    with campaign:
        for number in range(n_rounds):
            campaign.round(number)
        campaign.close()


def test_a_killed_window_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    run(WindowKills(tmp_path, 2, "decode"), 1)  # killed after 1.9 s


@pytest.mark.slow
def test_a_window_survives_its_engine(tmp_path: Path) -> None:
    run(EngineKills(tmp_path, 1, "saving"), 1)


@pytest.mark.slow
def test_a_window_ends_its_engine_when_the_terminal_closes(tmp_path: Path) -> None:
    run(SignalMatrix(tmp_path, 1, "closed terminal in resplit"), 1)


@pytest.mark.slow
def test_a_poisoned_engine_is_told_and_brought_back(tmp_path: Path) -> None:
    run(PoisonedEngine(tmp_path, 1, "abort"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "n_rounds"),
    [
        (WindowKills, 12),
        (EngineKills, 10),
        (PoisonedEngine, len(PHASES) * (len(POISONS) + 2)),
        (SignalMatrix, 30),
        (InstallerKills, 20),
        (MachineFaults, 13),
    ],
)
def test_every_kind_of_round(tmp_path: Path, make: type[Campaign], n_rounds: int) -> None:
    run(make(tmp_path, 2), n_rounds)
