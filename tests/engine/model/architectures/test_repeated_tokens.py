"""Captured and replayed tokens have the bits of computed ones."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from engine import Model, load_model
from engine.model.forward.ops import Ops
from tests.helpers.control_vector import write_control_vector
from tests.helpers.golden import golden_logits, golden_models, golden_path
from tests.helpers.passes import forward_alone
from tests.helpers.tiers import paired
from tests.helpers.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.usefixtures("kernels")

ROPE = Ops.rope
Logits = list[np.ndarray]
SPLITS = ([1], [1, 1], [3, 0, 1])


def singly(model: Model, ids: list[int], start: int = 0) -> Logits:
    """Return the logits after each token, computed one by one."""
    return [forward_alone(model.runtime.runner, [t], start + n) for n, t in enumerate(ids)]


def are_recorded(model: Model) -> bool:
    return all(rank.recordings for rank in model.runtime.ranks)


def never_recorded(model: Model) -> None:
    """Compute all tokens from now on, without capture."""
    model.runtime.runner.drop_recordings()
    model.runtime.runner.n_single[1] = 1000


def check(model: Model, ids: list[int]) -> None:
    found = singly(model, ids)
    assert are_recorded(model), [rank.refusal for rank in model.runtime.ranks]
    never_recorded(model)
    expected = singly(model, ids)
    assert not are_recorded(model)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "split"), paired(list(golden_models()) or ["none"], SPLITS), ids=str
)
def test_all_architectures(name: str, split: list[int]) -> None:
    ids, _ = golden_logits(name)
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(split)
    with load_model(path, devices, split, n_ctx=len(ids)) as model:
        check(model, ids)


IDS = [int(n) for n in np.random.default_rng(0).integers(0, 64, 40)]


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "F16", "F32"])
@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    ("split", "mode"),
    [([1], "tensor"), ([2, 1], "tensor"), ([2, 1], "layer"), ([0, 1], "tensor")],
    ids=str,
)
def test_splits_and_types(
    tmp_path: Path, quant: str, kv_type: str, split: list[int], mode: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant=quant, n_embd=256, n_ff=256, head_dim=32)
    options = {"split_mode": mode, "kv_type": kv_type, "n_ctx": 64}
    with load_model(path, ["cpu"] * len(split), split, **options) as model:
        check(model, IDS)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    with load_model(path, ["cpu", "cpu"], n_ctx=700) as loaded:
        yield loaded


def test_tokens_may_be_anywhere(model: Model) -> None:
    """Prompts between them, positions far apart, and back again."""
    runner = model.runtime.runner

    def script() -> Logits:
        found = singly(model, IDS[:5])
        forward_alone(runner, IDS * 15, 5, 599)
        found += singly(model, IDS[:9], 605)
        found += singly(model, IDS[9:12], 3)
        forward_alone(runner, IDS[:7], 250)
        return found + singly(model, IDS[5:20], 250)

    first = script()
    assert are_recorded(model)
    never_recorded(model)
    assert all(np.array_equal(a, b) for a, b in zip(first, script(), strict=True))


def test_results_are_not_overwritten(model: Model) -> None:
    found = singly(model, IDS)
    copies = [logits.copy() for logits in found]
    singly(model, IDS[::-1])
    assert all(np.array_equal(a, b) for a, b in zip(found, copies, strict=True))


def test_a_model_that_is_steered(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_embd=64, n_layer=3)
    vector = write_control_vector(tmp_path / "v.gguf", {1: np.ones(64, np.float32)})
    with load_model(path, ["cpu"], n_ctx=64) as model:
        plain = singly(model, IDS)
    with load_model(path, ["cpu"], n_ctx=64, control_vectors=[(vector, 1.0)]) as model:
        check(model, IDS)
        assert not np.array_equal(singly(model, IDS)[-1], plain[-1])


def test_what_cannot_be_repeated_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    with load_model(path, ["cpu", "cpu"], n_ctx=64) as model:
        expected = singly(model, IDS)
    monkeypatch.setattr(
        "engine.backends.cpu.kernels.small.small_ops.SmallOps.rope", lambda *_: None
    )
    monkeypatch.setattr("engine.model.forward.ops.Ops.rope", asking_rope)
    with load_model(path, ["cpu", "cpu"], n_ctx=64) as model:
        found = singly(model, IDS)
        assert not are_recorded(model)
        assert all(
            "item" in rank.refusal or "scalar" in rank.refusal for rank in model.runtime.ranks
        )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def asking_rope(self: Ops, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotate heads after reading one of the numbers, which a capture must not do."""
    if float(cos[0, 0, 0]) > 2:
        return x
    return ROPE(self, x, cos, sin, style)


def test_several_models_at_once(tmp_path: Path) -> None:
    paths = [tiny_gguf(tmp_path / f"{n}.gguf", quant="Q8_0", seed=n) for n in range(2)]
    alone = []
    for path in paths:
        with load_model(path, ["cpu"], n_ctx=64) as one:
            alone.append(singly(one, IDS))
    with load_model(paths[0], ["cpu"], n_ctx=64) as a, load_model(paths[1], ["cpu"], n_ctx=64) as b:
        for n, token in enumerate(IDS):
            for model, expected in ((a, alone[0]), (b, alone[1])):
                assert np.array_equal(forward_alone(model.runtime.runner, [token], n), expected[n])


def test_a_rank_that_fails_is_an_error_and_then_forgotten(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = singly(model, IDS)
    failing = model.runtime.ranks[1]

    def fail() -> None:
        raise ZeroDivisionError("on rank 1")

    for _ in range(3):
        assert are_recorded(model)
        monkeypatch.setattr(failing.recordings[1], "run", fail)
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            forward_alone(model.runtime.runner, IDS[:1], 0)
        assert not are_recorded(model)
        found = singly(model, IDS)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_impatient_ranks_sleep_and_wake(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = singly(model, IDS)
    model.runtime.runner.drop_recordings()
    monkeypatch.setattr("engine.backends.cpu.thread_comm.SPIN_TURNS", 1)
    found = singly(model, IDS * 3)
    assert are_recorded(model)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))
