"""The kernel of exchanges in two processes at once: interpreted, but really waiting."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.link_side import FILE_BYTES, MOST, N_PROGRAMS, play


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "slots"
    made.write_bytes(bytes(FILE_BYTES))
    return made


def test_two_kernels_write_for_each_other_in_turn(path: Path) -> None:
    """More rounds than slots have halves and data have rows, so whoever is late finds old ones.

    One side expects other words in two pairs of the first row, which serves in four of the rounds.
    """
    n_rounds = 7
    command = [sys.executable, "-m", "tests.helpers.link_side", str(path), str(n_rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        assert play(0, path, n_rounds, n_bad=3) == [n_rounds, 0, 4 * 2]
        assert json.loads(other.stdout.readline()) == [n_rounds, 0, 0]


def test_a_kernel_that_is_alone_gives_up(path: Path) -> None:
    """It gives up in its first round, and begins no second one."""
    assert play(0, path, 5, limit=2) == [0, N_PROGRAMS * MOST, 0]
