"""The sampler's steps against slow references, and the sampler as a whole."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.decoding.sampling.sampler import Sampler, Uniforms
from engine.decoding.sampling.steps import (
    Candidates,
    MinP,
    Penalties,
    SamplingTemperature,
    TokenHistory,
    TopK,
    TopP,
    TypicalP,
)
from engine.errors import EngineError
from engine.sampling_params import SamplingParams

# few distinct values, so that ties are common
LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(
        st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-math.inf)
    ),
).filter(lambda logits: np.isfinite(logits).any())
FRACTIONS = st.floats(0, 1)
NEUTRAL = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=0)


def make(logits) -> Candidates:
    return Candidates.from_logits(np.asarray(logits, dtype=np.float32))


def vocabulary(n: int = 40_000, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * 3).astype(np.float32)


def params(**changes) -> SamplingParams:
    return dataclasses.replace(NEUTRAL, **changes)


def softmax(logits) -> list[float]:
    best = max(logits)
    weights = [math.exp(float(x) - best) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def ranked(logits) -> list[int]:
    """Return ids by falling logit, equal ones by rising id."""
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


def slow_top_p(logits, p: float) -> list[int]:
    chances, total, kept = softmax(logits), 0.0, []
    for i in ranked(logits):
        kept.append(i)
        total += chances[i]
        if total >= p:
            break
    return kept


def slow_typical_p(logits, p: float) -> list[int]:
    chances = softmax(logits)
    entropy = -math.fsum(c * math.log(c) for c in chances if c > 0)

    def oddness(i: int) -> float:
        return abs(-math.log(chances[i]) - entropy) if chances[i] > 0 else math.inf

    total, kept = 0.0, []
    for i in sorted(range(len(logits)), key=oddness):
        kept.append(i)
        total += chances[i]
        if total > p:
            break
    return kept


# --- each step


@given(LOGITS, st.integers(1, 70))
def test_top_k_keeps_the_k_likeliest_sorted(logits, k):
    """Ties at the edge go to the lowest id, so that the result is one only."""
    kept = TopK(k)(make(logits))
    assert kept.ids.tolist() == ranked(logits)[:k]
    assert kept.logits.tolist() == logits[kept.ids].tolist()


@pytest.mark.parametrize("k", [1, 2, 40, 1000, 39_999, 40_000, 50_000])
def test_top_k_of_a_large_vocabulary_equals_a_full_sort(k):
    """The bound from block maxima is used only here; a block size divides no such vocabulary."""
    logits = vocabulary(39_989)
    logits[::7] = np.round(logits[::7])
    assert TopK(k)(make(logits)).ids.tolist() == ranked(logits)[:k]


def test_top_k_finds_winners_that_share_a_block_or_stand_at_the_end():
    logits = np.zeros(10_000, dtype=np.float32)
    winners = [100, 101, 102, 103, 9_998, 9_999]
    logits[winners] = [6, 5, 4, 3, 2, 1]
    assert TopK(6)(make(logits)).ids.tolist() == winners


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_top_p_equals_the_slow_reference(p, scale):
    logits = np.random.default_rng(1).normal(0, scale, 3000).astype(np.float32)
    assert TopP(p)(make(logits)).ids.tolist() == slow_top_p(logits, p)


def test_top_p_ends_with_the_token_that_reaches_p_exactly():
    assert TopP(0.5)(make([0, 0, 0, 0])).ids.tolist() == [0, 1]
    assert TopP(0.51)(make([0, 0, 0, 0])).ids.tolist() == [0, 1, 2]


def test_top_p_is_the_same_whether_the_first_few_suffice_or_not():
    """A flat vocabulary needs more tokens than are sorted at first."""
    logits = np.linspace(0, 0.5, 5000, dtype=np.float32)
    kept = TopP(0.9)(make(logits))
    assert len(kept) > TopP.N_FIRST
    assert kept.ids.tolist() == slow_top_p(logits, 0.9)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.6, 0.95])
@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
def test_typical_p_equals_the_slow_reference(p, scale):
    logits = np.random.default_rng(2).normal(0, scale, 500).astype(np.float32)
    logits[3] = -np.inf
    assert TypicalP(p)(make(logits)).ids.tolist() == sorted(slow_typical_p(logits, p))


def test_typical_p_ends_with_the_token_that_exceeds_p():
    assert TypicalP(0.5)(make([0, 0, 0, 0])).ids.tolist() == [0, 1, 2]


def test_typical_p_may_drop_the_likeliest_token():
    """That is what sets it apart: a token can be too predictable."""
    logits = np.log(np.array([0.4] + [0.006] * 100))
    assert 0 not in TypicalP(0.5)(make(logits)).ids


@given(LOGITS, FRACTIONS.filter(lambda p: p > 0))
def test_min_p_keeps_what_is_at_least_p_times_as_likely_as_the_best(logits, p):
    kept = set(MinP(p)(make(logits)).ids.tolist())
    threshold = float(logits.max()) + math.log(p)
    for i, logit in enumerate(logits.tolist()):
        if abs(logit - threshold) > 1e-5:
            assert (i in kept) == (logit > threshold)


def test_min_p_of_one_keeps_all_that_tie_for_the_best():
    assert MinP(1.0)(make([2, 7, 7, 6.999])).ids.tolist() == [1, 2]


@given(LOGITS, st.floats(0.05, 5))
def test_temperature_is_a_power_of_the_probabilities(logits, temperature):
    got = SamplingTemperature(temperature)(make(logits)).probabilities()
    expected = softmax([float(x) / temperature for x in logits])
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_a_tiny_temperature_leaves_only_the_best_and_no_warning():
    got = SamplingTemperature(1e-300)(make([1, 3, 2, -math.inf])).probabilities()
    assert got.tolist() == [0, 1, 0, 0]


def history_of(tokens, n_last: int) -> TokenHistory:
    history = TokenHistory(n_last)
    for token in tokens:
        history.append(token)
    return history


@given(
    LOGITS,
    st.lists(st.integers(0, 70), max_size=80),
    st.integers(-1, 20),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_equal_the_slow_reference(logits, tokens, n_last, repeat, frequency, presence):
    """Tokens outside of the vocabulary are allowed: a prompt may come from another tokenizer."""
    window = (
        tokens if n_last < 0 else tokens[len(tokens) - n_last :] if n_last < len(tokens) else tokens
    )
    expected = logits.astype(np.float64)
    for i in set(window):
        if i < len(expected):
            expected[i] = expected[i] / repeat if expected[i] > 0 else expected[i] * repeat
            expected[i] -= window.count(i) * frequency + presence
    before = logits.copy()
    got = Penalties(history_of(tokens, n_last), repeat, frequency, presence)(make(logits))
    np.testing.assert_allclose(got.logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logits, before)


def test_the_repeat_penalty_lowers_positive_and_negative_logits_alike():
    got = Penalties(history_of([0, 1, 2], -1), 2.0, 0.0, 0.0)(make([0.5, -0.5, 0]))
    assert got.logits.tolist() == [0.25, -1, 0]


def test_penalties_find_their_tokens_among_sorted_candidates():
    """The steps may come in another order than the default one."""
    few = TopK(3)(make([1, 4, 2, 3, 0]))
    got = Penalties(history_of([0, 0, 0, 3], -1), 1.0, 1.0, 2.0)(few)
    assert dict(zip(got.ids.tolist(), got.logits.tolist(), strict=True)) == {1: 4, 3: 0, 2: 2}


def test_history_forgets_what_leaves_the_window():
    tokens, counts = history_of([5, 5, 7, 5, 9], 3).counts()
    assert tokens.tolist() == [5, 7, 9]
    assert counts.tolist() == [1, 1, 1]


@given(
    st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12),
    st.integers(-1, 8), st.data(),
)  # fmt: skip
def test_tokens_added_at_once_count_as_those_added_one_by_one(first, more, n_last, data):
    one_by_one = history_of(first + more, n_last)
    at_once = history_of(first, n_last)
    at_once.extend(more)
    n_back = data.draw(st.integers(0, len(first + more)))
    for n in (0, n_back):
        one_by_one.take_back(n)
        at_once.take_back(n)
        assert at_once.tokens == one_by_one.tokens
        for found, expected in zip(at_once.counts(), one_by_one.counts(), strict=True):
            assert found.tolist() == expected.tolist()


def test_a_prompt_at_once_is_sampled_behind_as_token_by_token():
    """DRY, which looks at all tokens, included."""
    tokens = [*vocabulary(300).argsort().tolist(), 3, 4, 5, 6, 3, 4, 5]
    settings = params(repeat_penalty=1.3, repeat_last_n=20, dry_multiplier=2.0, seed=5)
    at_once, one_by_one = Sampler(settings), Sampler(settings)
    at_once.accept_all(tokens)
    for token in tokens:
        one_by_one.accept(token)
    logits = vocabulary(300, seed=1)
    found, expected = at_once.candidates(logits), one_by_one.candidates(logits)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logits.tolist() == expected.logits.tolist()
    assert at_once.revision == one_by_one.revision == len(tokens)


def test_history_of_length_zero_remembers_nothing():
    assert history_of([1, 2], 0).counts()[0].size == 0


# --- what holds for every filter

FILTERS = st.one_of(
    st.integers(1, 70).map(TopK),
    FRACTIONS.map(TopP),
    FRACTIONS.map(TypicalP),
    FRACTIONS.filter(lambda p: p > 0).map(MinP),
)


@given(LOGITS, st.lists(FILTERS, min_size=1, max_size=4))
def test_filters_keep_a_subset_in_a_known_order_with_logits_unchanged(logits, filters):
    candidates = make(logits)
    for step in filters:
        before = set(candidates.ids.tolist())
        candidates = step(candidates)
        ids = candidates.ids.tolist()
        assert 1 <= len(ids) == len(set(ids))
        assert set(ids) <= before
        assert ids == (
            [i for i in ranked(logits) if i in ids] if candidates.is_sorted else sorted(ids)
        )
        assert candidates.logits.tolist() == logits[ids].tolist()
        assert candidates.probabilities().sum() == pytest.approx(1)


# --- the sampler


def test_the_steps_stand_in_llama_cpps_order():
    sampler = Sampler(SamplingParams(repeat_penalty=1.1, typical_p=0.9))
    assert [type(step) for step in sampler.steps] == [
        Penalties, TopK, TypicalP, TopP, MinP, SamplingTemperature,
    ]  # fmt: skip


def test_settings_that_change_nothing_add_no_step():
    assert Sampler(NEUTRAL).steps == []
    assert Sampler(params(repeat_last_n=0, repeat_penalty=1.5)).steps == []


def test_greedy_takes_the_best_and_of_equal_ones_the_lowest_id():
    greedy = Sampler(params(temperature=0, top_k=2))
    assert greedy.sample(np.array([1, 5, 5, 4], dtype=np.float32)) == 1


def test_greedy_obeys_penalties():
    greedy = Sampler(params(temperature=0, presence_penalty=2.0))
    logits = np.array([1, 5, 4], dtype=np.float32)
    chosen = []
    for _ in range(3):
        chosen.append(greedy.sample(logits))
        greedy.accept(chosen[-1])
    assert chosen == [1, 2, 1]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    logits = vocabulary(1000)

    def sampled(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.sample(logits) for _ in range(50)]

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)


def test_an_open_seed_is_drawn_and_can_be_used_again():
    logits = vocabulary(1000)
    first = Sampler(SamplingParams())
    again = Sampler(SamplingParams(seed=first.seed))
    assert [first.sample(logits) for _ in range(20)] == [again.sample(logits) for _ in range(20)]
    assert len({Sampler(SamplingParams()).seed for _ in range(8)}) > 1


def test_samples_follow_the_probabilities():
    """20 000 samples: five standard deviations are below 0.018."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(NEUTRAL)
    n = 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=4)
    assert counts / n == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.018)


def test_numbers_that_were_looked_at_are_drawn_as_they_would_have_been():
    plain, seen = Uniforms(7), Uniforms(7)
    wanted = [plain.draw() for _ in range(12)]
    drawn = []
    for n in (0, 3, 2, 5, 0):
        assert seen.peek(n) == wanted[len(drawn) : len(drawn) + n]
        drawn += [seen.draw(), seen.draw()]
    assert drawn == wanted[:10]


def test_masked_tokens_are_never_sampled():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[3, 49]] = 0
    sampler = Sampler(params(top_k=10))
    assert {sampler.sample(logits) for _ in range(200)} == {3, 49}


def test_a_draw_of_zero_skips_masked_tokens(monkeypatch):
    sampler = Sampler(NEUTRAL)
    monkeypatch.setattr(sampler.uniforms, "draw", lambda: 0.0)
    assert sampler.sample(np.array([-np.inf, -np.inf, 1, 2], dtype=np.float32)) == 2


def test_sampling_leaves_the_logits_as_they_are():
    logits = vocabulary(500)
    logits.setflags(write=False)
    sampler = Sampler(SamplingParams(repeat_penalty=1.3, seed=1))
    for _ in range(5):
        sampler.accept(sampler.sample(logits))


def test_candidates_are_what_sample_chooses_from():
    logits = vocabulary(500)
    sampler = Sampler(SamplingParams(top_k=5, seed=3))
    allowed = set(sampler.candidates(logits).ids.tolist())
    assert len(allowed) <= 5
    assert {sampler.sample(logits) for _ in range(100)} <= allowed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unusable_logits_are_an_error_not_garbage(bad, temperature):
    logits = vocabulary(1000)
    logits[123] = bad
    with pytest.raises(EngineError, match="no usable probabilities"):
        Sampler(SamplingParams(temperature=temperature)).sample(logits)


@pytest.mark.parametrize("logits", [[], [-math.inf, -math.inf]])
def test_no_possible_token_is_an_error(logits):
    with pytest.raises(EngineError, match="no usable probabilities"):
        make(logits)
