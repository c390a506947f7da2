"""Machines whose ranks use a GPU's kernels: captured tokens have steps between machines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LoadParams, Model, SamplingParams
from tests.helpers.machine_threads import machines, model_on
from tests.helpers.tiny_gguf import least_gguf

WISHES = (
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=3, temperature=1.2, max_tokens=3, ignore_eos=True),
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def results(model: Model) -> tuple[np.ndarray, list[list[int]]]:
    """Return logits, and the tokens of answers alone, which are replayed, and together."""
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
