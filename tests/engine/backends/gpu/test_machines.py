"""Machines with ranks that use a GPU's kernels: captured tokens have steps between machines."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import LoadParams, Model, SamplingParams
from engine.backends.executor import RankExecutor
from engine.backends.gpu.decode.rank_capture import _Capturing
from engine.errors import CommError
from engine.runtime import loader as builder
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank import Replay
from tests.engine.backends.gpu.test_mtp import N_VOCAB, PROMPTS
from tests.engine.backends.gpu.test_mtp import check as check_guesses
from tests.helpers.golden import nmse
from tests.helpers.guessed_answers import guessed_answers
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.mtp_models import PlainMTP, mtp_gguf
from tests.helpers.tiny_gguf import least_gguf

WISHES = (
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=3, temperature=1.2, max_tokens=3, ignore_eos=True),
)

BAR = 1e-3
"""Largest NMSE where CPUs compute a part, with activations of 8 bits in products."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def results(model: Model) -> tuple[np.ndarray, list[list[int]]]:
    """Return logits, and the tokens of answers: alone, which are replayed, and together."""
    logits = model.logits([3, 4])
    alone = [[i for e in model.generate([7], w) for i in getattr(e, "ids", ())] for w in WISHES]
    streams = [model.generate([5, 6, 9], wish) for wish in WISHES]
    together: list[list[int]] = [[] for _ in streams]
    while not all(stream.is_over for stream in streams):
        for stream, ids in zip(streams, together, strict=True):
            ids += getattr(next(stream, None), "ids", ())
    return logits, alone + together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [((1, 1), "groups"), ((2, 1), "groups"), ((1, 1), "tensor"), ((2, 1), "tensor")],
)
def test_captured_tokens_have_the_bits_of_one_process(
    tmp_path: Path, sizes: Sequence[int], mode: str
) -> None:
    path, given = least_gguf(tmp_path / "m.gguf"), dict[str, Any](n_ctx=128, parallel=2)
    groups = tuple(sizes) if mode == "groups" else None
    params = LoadParams(
        str(path), ("cpu",) * sum(sizes), split_mode=mode, groups=groups, draft="off", **given
    )
    with Model(params) as one:
        logits, tokens = results(one)
    with machines(len(sizes)) as there, model_on(sizes, params) as model:
        found, found_tokens = results(model)
        assert all(rank.recordings for rank in model.runtime.ranks), "tokens were captured"
        assert model.fallbacks == ()
    assert np.array_equal(found, logits)
    assert found_tokens == tokens
    assert not there.failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mode"), [((1, 1), "tensor"), ((1, 1), "groups"), ((2, 1), "tensor")]
)
def test_mtp_blocks_guess_in_captured_passes(
    tmp_path: Path, sizes: Sequence[int], mode: str
) -> None:
    """Draft tokens equal the formulas', alone and for two; answers are as without them."""
    path = mtp_gguf(tmp_path / "m.gguf", n_vocab=N_VOCAB)
    groups = tuple(sizes) if mode == "groups" else None
    given = dict[str, Any](n_ctx=256, kv_type="f32", parallel=2, draft="mtp", groups=groups)
    params = LoadParams(str(path), ("cpu",) * sum(sizes), split_mode=mode, **given)
    with machines(len(sizes)) as there, model_on(sizes, params) as model:
        assert model.runtime.runner.max_verify_rows == 16
        check_guesses(model, PlainMTP(path), 8, 3, n_before=3)
        check_guesses(model, PlainMTP(path), 6, 1, 2, PROMPTS[:2])
        for rank in model.runtime.ranks:
            assert {(0, 1, 0), (0, 2, 0)} <= set(rank.draft_recordings)
            assert all(isinstance(found, Replay) for found in rank.draft_recordings.values())
    assert not there.failures


@pytest.mark.parametrize(
    ("on_cpu", "n_answers"),
    [(1, 0), *(pytest.param(number, 3, marks=pytest.mark.slow) for number in (0, 1))],
)
def test_a_machine_with_cpus_alone_takes_part_in_captures(
    tmp_path: Path, on_cpu: int, n_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes as many rows, as often; before, a load waited for it forever."""
    made = builder.RankBuilder._backend

    def backend(self: builder.RankBuilder, number: int, has_kernels: bool) -> object:
        with monkeypatch.context() as patch:
            if number == on_cpu:
                patch.setattr(builder, "kernels_for", lambda name: "cpu")
            return made(self, number, has_kernels)

    path = least_gguf(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu",) * 2, n_ctx=128, parallel=3, draft="off")
    with Model(params) as one:
        expected = one.logits([3, 4])
    monkeypatch.setattr(builder.RankBuilder, "_backend", backend)
    with machines(2) as there, model_on((1, 1), params) as model:
        assert model.runtime.ranks[0].backend.captures == (on_cpu != 0)
        assert nmse(model.logits([3, 4]), expected) < BAR
        guessed_answers(model, [[5, 6 + k, 9] for k in range(n_answers)], 5)
        sizes = {1, 4} if n_answers else {1}
        assert set(model.runtime.ranks[0].recordings) >= sizes, "three are computed like four"
    assert not there.failures


@pytest.mark.parametrize("n_failures", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_machine_whose_kernels_meet_nobody_computes_as_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_failures: int
) -> None:
    """On cards, kernels of two ranks wait for each other; a machine's only rank does not.

    The former compute a size twice more, and all of it again where they have not met; before, they
    waited for the other machine forever.
    """
    proved, failures = _Capturing._prove, [CommError(0, "it snows")] * n_failures

    def prove(self: _Capturing, expected: Any, found: Any) -> None:
        if self._one_shots is not None and failures:
            error = failures.pop()
            self._one_shots = SimpleNamespace(problem=lambda: error)  # type: ignore[assignment]
        proved(self, expected, found)

    path = least_gguf(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu",) * 3, n_ctx=128, n_batch=4, draft="off")
    with Model(params) as one:
        expected = one.logits([3, 4])
    monkeypatch.setattr(_Capturing, "_prove", prove)
    monkeypatch.setattr(RankExecutor, "has_gpus", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with machines(2) as there, model_on((2, 1), params) as model:
        meeting = model.runtime.runner.meeting
        assert meeting.here == meeting.meetings == (n_failures < 2, n_failures < 2)
        assert np.array_equal(model.logits([3, 4]), expected)
        assert {1} <= set(model.runtime.ranks[0].recordings)
    assert not there.failures


@pytest.mark.slow
def test_machines_rehearse_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before kernels of several GPUs meet, which they do only on cards."""

    def rehearsed(self: ModelRunner, compute: Any) -> bool:
        self._read(compute, lambda logits: logits.cpu())
        return True

    monkeypatch.setattr(ModelRunner, "_rehearsed", rehearsed)
    path = least_gguf(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu",) * 2, n_ctx=128, draft="off")
    with machines(2) as there, model_on((1, 1), params) as model:
        assert model.runtime.runner.rehearse(3)
        assert len(model.logits([3, 4])) == 2
    assert not there.failures
