"""Times of a token: they add up, and waiting is told from computing."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import Model, load_model
from engine.runtime.timeline import TokenTimes, timed
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import tiny_gguf

DELAY_S = 0.05
"""Seconds by which the slow rank begins later."""


@pytest.fixture(params=["kernels", "reference"])
def model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Model]:
    if request.param == "reference":
        monkeypatch.setenv("TANDEM_BACKEND", "reference")
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=3)
    with load_model(path, ["cpu", "cpu"], n_ctx=64) as loaded:
        yield loaded


def tokens(model: Model, n: int, start: int = 0) -> list[TokenTimes]:
    runtime = model.runtime
    return [
        timed(runtime.ranks, at, lambda at=at: forward_alone(runtime.runner, [at], at))[1]
        for at in range(start, start + n)
    ]


def test_parts_fit_into_the_whole(model: Model) -> None:
    for times in tokens(model, 8):
        assert len(times.ranks) == 2
        for rank in times.ranks:
            assert rank.computed_s > 0
            assert rank.waited_s >= 0
            assert rank.computed_s + rank.waited_s <= times.seconds * (1 + 1e-9)
    assert times.position == 7


@pytest.mark.parametrize("how", ["computed", "repeated"])
def test_who_is_quick_waits_for_who_is_slow(
    model: Model, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = model.runtime.ranks[1]
    if how == "computed":
        model.runtime.runner.drop_recordings()
        model.runtime.runner.n_single[1] = 100
    tokens(model, 3)
    name = "replay" if slow.recordings else "compute"
    assert (name == "replay") == (how == "repeated" and slow.backend.records)
    original = getattr(slow, name)

    def delayed(*args: object, **options: object) -> torch.Tensor | None:
        time.sleep(DELAY_S)
        result: torch.Tensor | None = original(*args, **options)
        return result

    monkeypatch.setattr(slow, name, delayed)
    found = tokens(model, 5, 3)
    assert all(times.seconds > DELAY_S for times in found)
    assert all(times.ranks[0].waited_s <= times.seconds for times in found)
    # other programs only take time from a token: what is least in some tokens is the rank's own
    assert max(times.ranks[0].waited_s for times in found) > 0.6 * DELAY_S
    assert min(times.ranks[0].computed_s for times in found) < 0.4 * DELAY_S
    assert min(times.ranks[1].waited_s for times in found) < 0.4 * DELAY_S
