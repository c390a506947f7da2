"""Values that go straight between machines: real processes, with gloo in the place of NCCL."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Model
from engine.distributed import straight
from engine.distributed.machine_comm import RankLayout
from engine.distributed.straight import BACKEND_VARIABLE, NCCL, StraightBackend
from engine.distributed.straight_proof import used_ports
from tests.helpers import node_numbers
from tests.helpers.golden import golden_path
from tests.helpers.node_processes import wait_until_all_end_well
from tests.helpers.straight_ranks import SOON_S


def ran(program: str, n: int, *words: str, **variables: str) -> None:
    """Run a program as n machines on the loopback interface until all end well."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.helpers.{program}", *words],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(28500 + os.getpid() % 1000),
                "GLOO_SOCKET_IFNAME": "lo", **variables,
            },
            stdin=subprocess.DEVNULL,
        )
        for rank in range(n)
    ]  # fmt: skip
    wait_until_all_end_well(started)


def test_the_way_is_proven_and_given_up_where_it_fails(tmp_path: Path) -> None:
    ran("straight_ranks", 2, str(tmp_path / "found.json"))
    first, second = (json.loads((tmp_path / f"found.{n}").read_text()) for n in range(2))
    for found in (first, second):
        assert found["gloo"] == found["slow"] == []
        assert found["measured"]
        assert len(found["auto"]) == 2
        assert all(found["sums"])
        assert found["wrong"] == []
        (sentence,) = found["fallbacks"]
        assert sentence.startswith(
            "Between the machines, NCCL is not used: here: it delivers wrong"
        )
        assert found["error"].startswith("NCCL cannot carry values between the machines: here: ")
        assert found["still"] == [0, 1], "control goes on"
    assert first["hanging"] == "values have not arrived within 2 s"
    assert first["took"] >= SOON_S


class FakeWork:
    """What a backend has begun; notes how it is waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[object, ...]] = []

    def wait(self, *limit: object) -> None:
        self.waits.append(limit)


class FakeStream:
    """Stream whose events are done after some looks."""

    def __init__(self, n_look: int) -> None:
        self.n_look = n_look

    def record_event(self) -> "FakeStream":
        return self

    def query(self) -> bool:
        self.n_look -= 1
        return self.n_look < 0


def test_the_host_polls_an_event_and_does_not_sleep_in_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a timeout, NCCL's own `wait` looks once in a millisecond."""
    monkeypatch.setattr(straight, "SPINS", 5)
    for n_look, is_done in ((3, True), (7, True), (sys.maxsize, False)):
        monkeypatch.setattr(straight, "STUCK_S", 300.0 if is_done else 0.0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, n=n_look: FakeStream(n))
        work = FakeWork()
        assert straight._finished(work, torch.device("cuda:0")) == is_done
        assert work.waits == [()]


def test_ports_are_those_between_which_a_pass_sends() -> None:
    layout = RankLayout((2, 1, 2), 0)
    split: Any = Split(((0, 1), (0, 1), (2,), (3, 4)))
    assert used_ports(split, layout) == [((0, 0), (1, 2)), ((1, 2), (2, 3))]
    tensor: Any = Split(((0, 1, 2, 3, 4),) * 4)
    assert used_ports(tensor, layout) == [((0, 0), (1, 2), (2, 3))]
    alone: Any = Split(((0, 1),) * 4)
    assert used_ports(alone, layout) == []
    behind: Any = Split(((1,), (3,), (1,), (1,)))
    assert used_ports(behind, layout) == [((0, 1), (2, 3))]


class Split:
    """Stand-in of a cut: groups of the embedding, of two blocks, and of the output head."""

    def __init__(self, groups: Sequence[tuple[int, ...]]) -> None:
        first, *blocks, self.last_group = groups
        self.embedding, self.blocks = Owned(first), [Owned(group) for group in blocks]


class Owned:
    """Stand-in of a part with its ranks."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group

    def owners(self) -> tuple[int, ...]:
        return self.group


def test_backends_that_are_not_there_are_named() -> None:
    assert StraightBackend("gloo", "cpu").problem == ""
    if sys.platform != "linux":
        assert NCCL.problem
    assert StraightBackend("ucc", "cuda").problem == "its PyTorch build lacks UCC"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["groups", "tensor", "layer"])
@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "olmoe-q4_k_m", "falcon-h1-q4_k_m"])
def test_the_straight_way_has_the_bits_of_one_process(tmp_path: Path, name: str, mode: str) -> None:
    path, n = golden_path(f"{name}.gguf"), 3
    with Model(node_numbers.params(path, n, mode)) as one:
        expected = node_numbers.numbers(one, tmp_path / "one.state")
    words = str(path), str(tmp_path / "found.npz"), mode
    ran("node_numbers", n, *words, **{BACKEND_VARIABLE: "gloo:cpu"})
    with np.load(tmp_path / "found.npz") as found:
        assert bool(found["straight"])
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
