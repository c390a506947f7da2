"""Rows of several sequences that a device samples, against the host's sampler of each."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.executor import RankOutOfMemory
from engine.backends.gpu.decode.sampler_slots import SamplerSlots
from engine.backends.gpu.decode.sampling import RowSampler, SampledRow
from engine.decoding.sampling.sampler import Sampler, SamplingRequest
from engine.errors import EngineError
from engine.runtime.row_sampling import RowSampling
from engine.sampling_params import SamplingParams
from tests.helpers.device_sampling import GREEDY, PENALTIES, random_logits, random_params

N_VOCAB = 300


class Row:
    """A sequence that the host samples, and the sampler that the device must match."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] = (7,), never: Sequence[int] = ()
    ) -> None:
        self.host, self.followed = Sampler(params), Sampler(params)
        self.never = list(never)
        for token in prompt:
            self.accept(token)

    def accept(self, token: int) -> None:
        self.token = token
        self.host.accept(token)
        self.followed.accept(token)

    def expected(self, logits: np.ndarray) -> int:
        masked = logits.copy()
        masked[self.never] = -math.inf
        return self.host.sample(masked)


def step(sampler: RowSampler, rows: Sequence[Row], logits: np.ndarray) -> list[bool]:
    """Sample the rows of logits, and accept the tokens; return which the device has sampled."""
    wanted = [SampledRow(n, row.token, row.followed, row.never) for n, row in enumerate(rows)]
    found = sampler.sample(torch.from_numpy(logits), wanted)
    for row, token, row_logits in zip(rows, found, logits, strict=True):
        expected = row.expected(row_logits)
        if token is None:
            masked = row_logits.copy()
            masked[row.never] = -math.inf
            assert row.followed.sample(masked) == expected
        else:
            assert token == expected
        row.accept(expected)
    return [token is not None for token in found]


def batch(random: np.random.Generator, n: int) -> np.ndarray:
    return np.stack([random_logits(random, N_VOCAB) for _ in range(n)])


def test_rows_are_sampled_as_each_would_be_by_the_host() -> None:
    """Settings, histories, banned tokens and random numbers of the rows differ."""
    random, n_sampled = np.random.default_rng(0), 0
    for _ in range(3):
        sampler = RowSampler(torch.device("cpu"), N_VOCAB, 4)
        rows = [
            Row(
                random_params(random), random.integers(0, N_VOCAB, 20).tolist(),
                random.integers(0, N_VOCAB, 2).tolist(),
            )
            for _ in range(4)
        ]  # fmt: skip
        for _ in range(4):
            n_sampled += sum(step(sampler, rows, batch(random, 4)))
    assert n_sampled > 0.9 * 48


def test_each_row_has_a_history_of_its_own() -> None:
    """Greedy from equal logits with a presence penalty, each row cycles through its own window."""
    params = SamplingParams(temperature=0, presence_penalty=1)
    rows = [
        Row(dataclasses.replace(params, repeat_last_n=n), range(n_prompt))
        for n, n_prompt in ((2, 2), (3, 3), (4, 1))
    ]
    sampler = RowSampler(torch.device("cpu"), N_VOCAB, 4)
    said = []
    for _ in range(5):
        assert all(step(sampler, rows, np.zeros((3, N_VOCAB), np.float32)))
        said.append([row.token for row in rows])
    assert list(zip(*said, strict=True)) == [(2, 0, 1, 2, 0), (3, 0, 1, 2, 3), (1, 2, 3, 4, 0)]


def test_sequences_come_and_go_and_are_sampled_elsewhere_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampler's state is written only if the device has missed tokens."""
    begun = list[int]()
    begin = SamplerSlots.begin
    monkeypatch.setattr(SamplerSlots, "begin", lambda *args: (begun.append(1), begin(*args))[1])
    random = np.random.default_rng(1)
    sampler = RowSampler(torch.device("cpu"), N_VOCAB, 2)
    rows = [Row(SamplingParams(seed=n, temperature=2, **PENALTIES), [5, 9, n]) for n in range(3)]
    for chosen, n_begun in (
        ((0, 1), 2),
        ((1, 0), 2),
        ((1,), 2),
        ((2, 1), 3),
        ((1, 2), 3),
        ((0, 2), 4),
    ):
        assert all(step(sampler, [rows[n] for n in chosen], batch(random, len(chosen))))
        assert len(begun) == n_begun
    for row in rows:  # the host samples one, and rolls another back
        token = row.expected(logits := random_logits(random, N_VOCAB))
        assert row.followed.sample(logits) == token
        row.accept(token)
    assert all(step(sampler, rows[:2], batch(random, 2)))
    assert len(begun) == 6
    for taken in (rows[0].host, rows[0].followed):
        taken.take_back(1)
    assert all(step(sampler, rows[:2], batch(random, 2)))


def test_rows_that_the_host_must_sample_do_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(2)
    params = [GREEDY, SamplingParams(seed=1, typical_p=0.9), SamplingParams(seed=2, min_p=0.5)]
    rows = [Row(each, [3, 4]) for each in params]
    sampler = RowSampler(torch.device("cpu"), N_VOCAB, 4)
    assert step(sampler, rows, batch(random, 3)) == [True, False, True]
    assert step(sampler, rows[::-1], batch(random, 3)) == [True, False, True]
    flat = batch(random, 3)
    flat[0] = flat[2] = 0  # the device has no room for that many equal ones
    monkeypatch.setattr("engine.backends.gpu.decode.sampler_slots.ROOM", 128)
    few = RowSampler(torch.device("cpu"), N_VOCAB, 4)
    assert step(few, rows, flat) == [False, False, False]
    flat[0, 17] = 1
    assert step(few, rows, flat) == [True, False, False], "also where it could not, before"


def test_a_mask_says_which_tokens_may_come() -> None:
    """Rows with masks, one of them shorter, are mixed with others without."""
    random = np.random.default_rng(3)
    sampler = RowSampler(torch.device("cpu"), N_VOCAB, 4)
    rows = [Row(SamplingParams(seed=n, temperature=3, top_k=40), [2], [0]) for n in range(4)]
    for at in range(2):
        logits = batch(random, 4)
        masks: dict[int, np.ndarray] = {1: random.random(N_VOCAB) < 0.1, 3: np.arange(70) % 32 > 29}
        if at:
            masks = {0: masks[3]}
        wanted = [
            SampledRow(n, row.token, row.followed, row.never, masks.get(n))
            for n, row in enumerate(rows)
        ]
        found = sampler.sample(torch.from_numpy(logits), wanted)
        for n, (row, token) in enumerate(zip(rows, found, strict=True)):
            mask = masks.get(n, np.ones(N_VOCAB, bool))
            logits[n, ~np.pad(mask, (0, N_VOCAB - len(mask)))] = -math.inf
            assert token == row.expected(logits[n])
            row.accept(token)
    logits = np.zeros((1, N_VOCAB), np.float32)
    nothing = SampledRow(0, rows[0].token, rows[0].followed, (), np.zeros(N_VOCAB, bool))
    assert sampler.sample(torch.from_numpy(logits), [nothing]) == [None], (
        "the host knows what to say"
    )


def test_what_one_row_lacks_concerns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that cannot be computed leaves its row to the host; too little memory leaves all."""
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")

    def fail() -> np.ndarray:
        raise EngineError("the form is too complex")

    def alone(do: Callable[[int], Any]) -> list[Any]:
        if is_full:
            raise RankOutOfMemory(0, torch.device("cpu"))
        return [do(0)]

    is_full = False
    executor: Any = SimpleNamespace(devices=[torch.device("cpu")], run=alone, call_inline=alone)
    rank: Any = SimpleNamespace(number=0, backend=SimpleNamespace(captures=True, samples=True))
    sampling = RowSampling(executor, rank, N_VOCAB)
    wishes = [SamplingRequest(Sampler(GREEDY), (), allowed) for allowed in (None, fail)]
    logits = torch.randn(3, N_VOCAB, generator=torch.Generator().manual_seed(0))
    token, *rows = sampling.results(logits, [1, 2, 3], [*wishes, None])
    assert token == int(logits[0].argmax())
    assert np.array_equal(np.stack(rows), logits[1:])
    is_full, sampling = True, RowSampling(executor, rank, N_VOCAB)
    for _ in range(2):
        assert np.array_equal(
            np.stack(sampling.results(logits, [1, 2, 3], [None, *wishes])), logits
        )
