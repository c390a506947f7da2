"""Whole models on ranks that stand for GPUs: one-shot all-reduces, copies, groups, empty ranks."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import load_model
from engine.backends.gpu.comm import communicator as comms
from engine.backends.gpu.comm import copies, one_shot
from engine.backends.gpu.comm.communicator import DeviceCommunicator, DeviceGroup
from engine.errors import LeftAlone
from engine.hardware.devices.topology import Routes
from engine.planning.memory import LINK_ROUND_BYTES
from tests.helpers.golden import nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import least_gguf

BAR = 1e-3
"""Largest NMSE against exact logits, as in `test_models`."""

IDS = [5, 9, 33, 12]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make all-reduces use copies, in several rounds; return a function that counts them."""
    assert LINK_ROUND_BYTES > 1 << 10
    counts = []
    monkeypatch.setattr(one_shot, "MAX_ONE_SHOT", 0)
    monkeypatch.setattr(copies, "ROUND_BYTES", 1 << 10)
    monkeypatch.setattr(copies, "SMALL_BYTES", 0)
    make = DeviceCommunicator._sum

    def counted(self: DeviceCommunicator, *args: object, **how: object) -> object:
        counts.append(1)
        return make(self, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceCommunicator, "_sum", counted)
    return lambda: len(counts)


def logits(path: Path, n_device: int, ids: list[int] = IDS, **how: object) -> np.ndarray:
    """Return the logits of all tokens at once; the first tokens alone must give the same."""
    with load_model(path, ["cpu"] * n_device, n_ctx=32, **how) as model:  # type: ignore[arg-type]
        assert isinstance(model.runtime.group, DeviceGroup)
        found = model.logits(ids)
        runner = model.runtime.runner
        again = np.stack([forward_alone(runner, [ids[n]], n)[0] for n in range(2)])
        assert nmse(again, found[:2]) < BAR
        return found


def reference(path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        return model.logits(IDS)


@pytest.mark.parametrize(
    "how",
    [{"split_mode": "groups", "groups": [2, 1]},
     pytest.param({"split_mode": "layer"}, marks=pytest.mark.slow)],
    ids=["groups", "layer"],
)  # fmt: skip
def test_the_stream_goes_from_group_to_group(
    how: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "groups" in how:  # capturing tokens takes long; only the ranks with their own layers do
        monkeypatch.setattr("engine.runtime.model_runner.captures_tokens", lambda: False)
    path = least_gguf(tmp_path / "m.gguf", n_layer=2)
    found = logits(path, 3 if "groups" in how else 2, **how)
    assert nmse(found, reference(path, monkeypatch)) < BAR


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_copied_is_rounded_and_right(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: Callable[[], int]
) -> None:
    path = least_gguf(tmp_path / "m.gguf")
    found = logits(path, n)
    assert copied() >= 3 * n
    assert nmse(found, reference(path, monkeypatch)) < BAR


@pytest.mark.slow
@pytest.mark.parametrize("by", ["one_shots", "copies"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "olmo2", "gemma4-moe", "qwen3next"])
def test_families_with_ranks_that_have_nothing(
    name: str, by: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A rank without a part of a block takes part in all of its all-reduces."""
    family = next(family for family in FAMILIES if family.name == name)
    path = tmp_path / "m.gguf"
    ids, expected = family.build(path)
    ids = ids[: len(IDS)]
    if by == "copies":
        request.getfixturevalue("copied")
    for split in ([1, 1], [30, 1, 1]):
        found = logits(path, len(split), ids, split=split)
        assert nmse(found, expected[: len(ids)]) < BAR


def test_what_ranks_met_by_is_freed_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is freed immediately: another split needs the memory, and the gc runs only rarely."""
    monkeypatch.setattr(
        "engine.runtime.model_runner.captures_tokens", lambda: False
    )  # capturing them takes long
    monkeypatch.setattr(one_shot, "MAX_ONE_SHOT", 3 * 32)
    gc.collect()
    gc.disable()
    try:
        with load_model(
            least_gguf(tmp_path / "m.gguf", quant="F32"), ["cpu"] * 2, n_ctx=32
        ) as model:
            model.logits(IDS)
            group = model.runtime.group
            assert isinstance(group, DeviceGroup)
            made = [
                weakref.ref(x) for x in (*group.one_shots._made[0, 1], *group._copying.values())
            ]
        assert [thing() for thing in made] == [None] * 4
    finally:
        gc.enable()


def test_a_device_that_fails_leaves_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA errors are sticky: every later call on the device fails, including recovery."""
    monkeypatch.setattr(comms, "_abandoned", kept := list[Any]())

    def record() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    queues: Any = SimpleNamespace(all=lambda: [SimpleNamespace(record=record)])
    group = DeviceGroup([torch.device("cpu")] * 2, Routes(), None, lambda device: queues)
    group.queues(0)
    group.abort()
    group.settle()
    assert any(group.one_shots in some for some in kept), "what the device may still use stays"
    with pytest.raises(LeftAlone):
        group.meet(0, (0, 1), None)
