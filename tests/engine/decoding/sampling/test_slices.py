"""Tokens sampled from the top candidates of each slice, against the sampler with all logits."""

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.sampling.sampler import Sampler
from engine.decoding.sampling.slices import (
    N_HEAD,
    N_LIMIT,
    N_WITHOUT_TOP_K,
    SliceCandidates,
    SliceQuery,
    n_candidates,
    sample_gathered,
    slice_candidates,
    slice_query,
)
from engine.decoding.sampling.steps import MinP, TopK
from engine.errors import EngineError
from engine.sampling_params import SamplingParams

NEUTRAL = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=0)
GREEDY = SamplingParams(temperature=0)

NUMBERS = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-math.inf))
"""Logits with few distinct values, so that ties are common."""

PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.31, 0.0]),
    min_p=st.sampled_from([0.02, 0.3, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repeat_last_n=st.sampled_from([-1, 0, 3]),
)
"""Settings that need candidates of all kinds."""


class Ranks:
    """Ranks with a slice each, which know nothing of the sampler but what is asked of them."""

    def __init__(self, params: SamplingParams, cuts: Sequence[int], never: Sequence[int] = ()):
        self.slices = [slice(*ends) for ends in pairwise(cuts)]
        self.sampler = Sampler(params)
        self.never, self.n_vocab = never, cuts[-1]

    def sample(self, logits: np.ndarray) -> int | None:
        query = slice_query(self.sampler, self.n_vocab, self.never)
        assert query is not None
        sent = json.dumps(query)
        told = []
        for own in self.slices:
            found = slice_candidates(logits[own], own.start, SliceQuery(*json.loads(sent)))
            words = found.pack(query.n)
            assert words.shape == (N_HEAD + 2 * query.n,), "the same on all ranks"
            told.append(SliceCandidates.unpack(words))
        return sample_gathered(self.sampler, told)

    def accept(self, token: int) -> None:
        self.sampler.accept(token)


@given(PARAMS, st.lists(NUMBERS, min_size=1, max_size=60), st.data())
def test_the_token_is_that_of_all_logits(
    params: SamplingParams, numbers: list[float], data: st.DataObject
) -> None:
    """Also of several slices, some of them empty, with penalties for sampled tokens."""
    n = len(numbers)
    ends = data.draw(st.lists(st.integers(0, n), max_size=4), "cuts")
    never = data.draw(st.lists(st.integers(0, n - 1), max_size=2), "never")
    logits = np.array(numbers, np.float32)
    masked = logits.copy()
    masked[never] = -math.inf
    host, ranks = Sampler(params), Ranks(params, [0, *sorted(ends), n], never)
    for _ in range(4):
        if not np.isfinite(masked).any():
            with pytest.raises(EngineError):
                ranks.sample(logits)
            return
        token = host.sample(masked)
        assert ranks.sample(logits) == token
        host.accept(token)
        ranks.accept(token)


@pytest.mark.parametrize("n_rank", [2, 3, 8])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=300, typical_p=0.8, temperature=2),
        dataclasses.replace(NEUTRAL, top_p=0.9),
        dataclasses.replace(NEUTRAL, top_p=0.999, min_p=0.1),
        dataclasses.replace(NEUTRAL, min_p=0.01, presence_penalty=0.7),
    ],
    ids=["greedy", "default", "typical", "top-p", "top-p and min-p", "min-p"],
)
def test_large_vocabularies(params: SamplingParams, n_rank: int) -> None:
    random = np.random.default_rng(n_rank)
    cuts = [0, *sorted(random.integers(0, 30_001, n_rank - 1).tolist()), 30_001]
    host, ranks = Sampler(params), Ranks(params, cuts, never=[7])
    for _ in range(10):
        logits = (random.standard_normal(30_001) * 4).astype(np.float32)
        logits[7] = math.nan
        masked = logits.copy()
        masked[7] = -math.inf
        token = host.sample(masked)
        assert ranks.sample(logits) == token
        host.accept(token)
        ranks.accept(token)


@pytest.mark.parametrize("changes", [{"top_p": 0.95}, {"min_p": 0.5}])
def test_where_lists_do_not_suffice_nothing_has_changed(changes: dict[str, float]) -> None:
    params = dataclasses.replace(NEUTRAL, **changes)
    host, ranks = Sampler(params), Ranks(params, [0, 3000, 6000])
    flat = np.zeros(6000, np.float32)
    assert ranks.sample(flat) is None
    assert ranks.sampler.sample(flat) == host.sample(flat), "with the same random number"


def test_a_longer_list_of_one_rank_does_not_hide_what_another_did_not_tell() -> None:
    """The second slice has many equal logits below the first's; it sent some of them alone."""
    params = dataclasses.replace(NEUTRAL, top_p=0.9)
    logits = np.zeros(5000, np.float32)
    logits[:1500] = np.linspace(3, 2, 1500)
    assert Ranks(params, [0, 1500, 5000]).sample(logits) is None
    logits[:1000] += 9
    assert Ranks(params, [0, 1500, 5000]).sample(logits) == Sampler(params).sample(logits)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_whoever_has_them(wrong: float) -> None:
    for place in (0, 9):
        logits = np.zeros(10, np.float32)
        logits[place] = wrong
        with pytest.raises(EngineError, match="no usable probabilities"):
            Ranks(GREEDY, [0, 4, 10]).sample(logits)


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 40),
        ({"temperature": 0, "top_k": 0}, 1),
        ({"top_k": N_LIMIT}, N_LIMIT),
        ({"top_k": N_LIMIT + 1}, None),
        ({"top_k": 0}, N_WITHOUT_TOP_K),
        ({"top_k": 0, "min_p": 0.0}, N_WITHOUT_TOP_K),
        ({"top_k": 0, "min_p": 0.0, "top_p": 1.0}, None),
        ({"top_k": 0, "typical_p": 0.5}, None),
        ({"typical_p": 0.5}, 40),
    ],
)
def test_how_long_lists_are(changes: dict[str, float], n: int | None) -> None:
    assert n_candidates(Sampler(SamplingParams(**changes)), 10_000) == n


def test_what_is_left_is_as_it_was() -> None:
    logits = np.arange(10, dtype=np.float32)
    before = logits.copy()
    found = slice_candidates(logits, 20, SliceQuery(4, never=[3, 29]))
    assert np.array_equal(logits, before)
    assert found.ids.tolist() == [28, 27, 26, 25]
    assert found.has_more


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "random"])
def test_a_step_that_is_not_known_needs_all_logits(params: SamplingParams) -> None:
    """Also one derived from a known step, and known ones in another order."""

    class Reversed(TopK):
        """A made-up step."""

    for steps in ([Reversed(3)], [lambda candidates: candidates], [MinP(0.1), TopK(2)]):
        sampler = Sampler(params)
        assert slice_query(sampler, 100) is not None
        sampler.steps += steps
        assert slice_query(sampler, 100) is None
