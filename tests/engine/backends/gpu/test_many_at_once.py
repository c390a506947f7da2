"""Several sequences in a pass by the kernels for GPUs: captured, on pages anywhere, as if alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Model, SamplingParams, TokenText, load_model
from engine.backends.gpu.decode.sampling import RowSampler
from engine.backends.gpu.launch.graph import NotRepeatable
from engine.decoding.sampling.sampler import Sampler
from engine.model.forward.batch import Batch, Piece
from engine.runtime.rank import Replay
from engine.runtime.row_sampling import RowSampling
from tests.helpers.golden import nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.sampled_rows import SETTINGS, check_rows
from tests.helpers.tiny_gguf import least_gguf

BAR = 1e-6
"""Largest NMSE between kernels for one row and for several: sums differ in their order."""

OPTIONS = {"n_ctx": 1536, "parallel": 3}
TABLES = ([4, 1], [0, 5], [3, 2])
IDS = ([5, 9, 33, 12, 7], [21, 4, 4, 8, 30], [1, 17, 2, 40, 11])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return least_gguf(tmp_path_factory.mktemp("models") / "m.gguf")


class Sequences:
    """Sequences that a model computes, each on its own pages and in its own slot."""

    def __init__(self, model: Model) -> None:
        self._runner = model.runtime.runner
        self.logits: list[list[np.ndarray]] = [[] for _ in IDS]

    def piece(self, one: int, n: int) -> Piece:
        tables = (TABLES[one],) * len(self._runner.groups)
        return Piece(len(self.logits[one]), n, tables, one, batch_index=one)

    def step(self, *parts: tuple[int, int]) -> None:
        """Compute the next tokens of some sequences: pairs of a sequence and how many."""
        pieces = [self.piece(one, n) for one, n in parts]
        ids = [
            token
            for (one, _), piece in zip(parts, pieces, strict=True)
            for token in IDS[one][piece.n_past : piece.stop]
        ]
        rows = iter(self._runner.forward(ids, Batch(tuple(pieces), 0)))
        for one, n in parts:
            self.logits[one].extend(next(rows).copy() for _ in range(n))


def check(model: Model, n_tokens: int = 5) -> None:
    alone, beside = Sequences(model), Sequences(model)
    for one in range(3):
        alone.step((one, n_tokens))
    beside.step((1, 2))
    beside.step((0, 1), (1, 1))
    beside.step((2, 2), (0, 1), (1, 1))
    while len(beside.logits[0]) < n_tokens:
        beside.step(*((one, 1) for one in range(3) if len(beside.logits[one]) < n_tokens))
    for found, expected in zip(beside.logits, alone.logits, strict=True):
        assert nmse(np.stack(found), np.stack(expected[: len(found)])) < BAR
    assert model.fallbacks == ()


@pytest.mark.parametrize("split", [[1], pytest.param([2, 1], marks=pytest.mark.slow)], ids=str)
def test_sequences_side_by_side_are_as_alone(split: list[int], path: Path) -> None:
    """Passes of as many single tokens are captured once, and replayed for any sequences.

    Their rows are sampled on the device, and one of them by the host.
    """
    with load_model(path, ["cpu"] * len(split), split, **OPTIONS) as model:
        check(model)
        for rank in model.runtime.ranks:
            assert set(rank.recordings) == {1, 2, 4}, "three are computed like four"
            assert all(isinstance(found, Replay) for found in rank.recordings.values())
        check_rows(model, 4)


@pytest.mark.slow
def test_a_replay_is_for_the_sequences_of_its_time(path: Path) -> None:
    with load_model(path, **OPTIONS) as model:
        replayed, computed = Sequences(model), Sequences(model)
        for run in (replayed, computed):
            for one in range(3):
                run.step((one, 1 + one))
            if run is computed:
                model.runtime.runner.drop_recordings()
                model.runtime.runner.n_single.update({1: 99, 2: 99})
            for pair in ((0, 1), (2, 0)):
                run.step(*((one, 1) for one in pair))
        for found, expected in zip(replayed.logits, computed.logits, strict=True):
            assert np.array_equal(np.stack(found), np.stack(expected))


@pytest.mark.slow
def test_recurrent_states_of_several_sequences(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "qwen3next")
    family.build(tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", **OPTIONS) as model:
        check(model)
        assert set(model.runtime.ranks[0].recordings) == {1, 2, 4}, "three are computed like four"


@pytest.mark.slow
def test_passes_of_a_size_that_cannot_be_captured_are_computed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single token, which can be, is not affected."""
    with load_model(path, **OPTIONS) as model:

        def fail(*_: object, **__: object) -> None:
            raise NotRepeatable("no room")

        monkeypatch.setattr("engine.backends.gpu.decode.rank_capture.capture_on_all", fail)
        check(model)
        assert set(model.runtime.ranks[0].recordings) == {1}
        assert model.runtime.token_source is not None


def sampled(model: Model, one: int, n: int) -> Sequence[object]:
    """Return the device's samples after a sequence's tokens, and the host's."""
    source, run = model.runtime.token_source, Sequences(model)
    assert source is not None
    run.step((one, 3))
    sampler = Sampler(SamplingParams(temperature=0))
    found, token = [], IDS[one][3]
    for at in range(n):
        assert source.serve(sampler, ())
        piece = Piece(3 + at, 1, (TABLES[one][: 1 if at < 2 else 2],), 0)
        following = source.next(token, piece, n - at)
        assert isinstance(following, int)
        found.append(token := following)
    source.stop()
    host, token = [], IDS[one][3]
    for at in range(n):
        batch = Batch((run.piece(one, 1)._replace(n_past=3 + at),), 0)
        token = int(model.runtime.runner.forward([token], batch)[0].argmax())
        host.append(token)
    return [found, host]


@pytest.mark.slow
def test_a_device_samples_ahead_on_pages(path: Path) -> None:
    """Then the sequence gets another page, and another sequence is sampled."""
    with load_model(path, **OPTIONS) as model:
        for one in (1, 2):
            found, host = sampled(model, one, 4)
            assert found == host


@pytest.mark.slow
@pytest.mark.parametrize("split", [[1], [2, 1]], ids=str)
def test_answers_side_by_side_are_those_that_a_host_samples_alone(
    split: list[int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host samples one of the four, and each first token."""
    sampled = list[int]()

    def noted(self: RowSampler, *args: Any) -> list[int | None]:
        found = sample(self, *args)
        sampled.extend(token for token in found if token is not None)
        return found

    sample = RowSampler.sample
    monkeypatch.setattr(RowSampler, "sample", noted)
    options = {"n_ctx": 512, "n_batch": 32, "parallel": 4}
    with load_model(path, ["cpu"] * len(split), split, **options) as model:
        pair, four = said(model, 1, 3), said(model, 0, 1, 2, 3)
        assert len(sampled) >= 4 + 6, "after prompts in the passes of the first tokens"
        model.runtime.runner.token_source = None
        monkeypatch.setattr(RowSampling, "results", lambda _, logits, *__: list(logits.numpy()))
        alone = [said(model, one)[0] for one in range(4)]
    assert four == alone
    assert pair == [alone[1], alone[3]]


def said(model: Model, *which: int) -> list[list[int]]:
    """Return the tokens of some answers, computed together."""
    streams = [
        model.generate(
            IDS[one % 3][: 2 + one], replace(SETTINGS[one], max_tokens=4, ignore_eos=True)
        )
        for one in which
    ]
    found: list[list[int]] = [[] for _ in which]
    while not all(stream.is_over for stream in streams):
        for mine, stream in zip(found, streams, strict=True):
            mine += [i for x in stream.ready() if isinstance(x, TokenText) for i in x.ids]
        model.step()
    return found
