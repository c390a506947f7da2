"""Steps that are off by default, against slow readings of what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.sampling.sampler import Sampler
from engine.decoding.sampling.steps import (
    Candidates,
    DynamicTemperature,
    LogitBias,
    MinP,
    Mirostat,
    SamplingTemperature,
    TopK,
    TopNSigma,
    TopP,
    Xtc,
)
from engine.errors import EngineError
from engine.sampling_params import SAMPLERS, SamplingParams

VALUES = st.lists(st.integers(-6, 6), min_size=1, max_size=30)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


def make(logits: Sequence[float]) -> Candidates:
    return Candidates.from_logits(np.array(logits, np.float32))


def chances(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [weight / math.fsum(weights) for weight in weights]


def ranked(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


@given(VALUES, st.floats(0.1, 3))
def test_top_n_sigma_keeps_what_is_within_n_deviations_of_the_best(
    logits: list[int], n: float
) -> None:
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logits) / len(logits))
    kept = TopNSigma(n)(make(logits)).ids.tolist()
    clear = 1e-5  # float32 may decide a tie either way
    assert set(kept) >= {i for i, x in enumerate(logits) if x > max(logits) - n * sigma + clear}
    assert set(kept) <= {i for i, x in enumerate(logits) if x >= max(logits) - n * sigma - clear}


def test_top_n_sigma_does_not_count_what_cannot_come() -> None:
    kept = TopNSigma(1.0)(make([3.0, 2.9, 0.0, -math.inf, -math.inf]))
    assert kept.ids.tolist() == [0, 1], "with -inf in it, the deviation would be no number"


@given(VALUES, st.floats(0.01, 0.5))
def test_xtc_leaves_out_all_likely_tokens_but_the_last(logits: list[int], threshold: float) -> None:
    kept = Xtc(1.0, threshold, lambda: 0.0)(make(logits)).ids.tolist()
    order = ranked(logits)
    likely = [i for i in order if chances(logits)[i] >= threshold]
    assert kept == order[max(0, len(likely) - 1) :] or len(logits) == 1


def test_xtc_acts_as_often_as_asked_and_never_above_half() -> None:
    numbers = iter([0.2, 0.3, 0.7])
    step = Xtc(0.3, 0.1, lambda: next(numbers))
    assert [len(step(make([2, 2, 0]))) for _ in range(3)] == [2, 3, 3]
    assert len(Xtc(1.0, 0.51, lambda: 0.0)(make([2, 2, 0]))) == 3


@given(VALUES, st.floats(0, 1), st.floats(0.5, 2), st.floats(0.5, 3))
def test_the_dynamic_temperature_follows_the_entropy(
    logits: list[int], lowest: float, spread: float, exponent: float
) -> None:
    found = DynamicTemperature(lowest, lowest + spread, exponent)(make(logits)).logits
    if len(logits) == 1:
        assert found.tolist() == logits
        return
    entropy = -math.fsum(p * math.log(p) for p in chances(logits)) / math.log(len(logits))
    temperature = lowest + spread * max(0.0, entropy) ** exponent
    wanted = [(x - max(logits)) / temperature if x < max(logits) else 0.0 for x in logits]
    assert found.tolist() == pytest.approx(wanted, rel=1e-4)


def test_biases_are_added_and_a_forbidden_token_never_comes() -> None:
    step = LogitBias(((2, 1.5), (0, -math.inf), (2, 0.5), (99, 5.0)))
    assert step(make([5, 1, 1])).logits.tolist() == [-math.inf, 1, 3]
    assert LogitBias(((0, -math.inf), (1, -math.inf)))(make([1, 2])).logits.tolist() == [1, 2]
    sampler = Sampler(SamplingParams(temperature=0, logit_bias=((7, -math.inf),)))
    logits = np.zeros(20, np.float32)
    logits[[7, 11]] = 9, 8
    assert sampler.sample(logits) == 11, "greedy, too"


@pytest.mark.parametrize("target", [2.0, 4.0])
def test_mirostat_steers_the_surprise_to_its_target(target: float) -> None:
    """The mean surprise among what it keeps is the target, whatever the model is."""
    random, seen = np.random.default_rng(0), []
    sampler = Sampler(SamplingParams(**{**NEUTRAL, "mirostat": True, "mirostat_tau": target}))
    step = sampler.steps[-1]
    assert isinstance(step, Mirostat)
    for _ in range(600):
        logits = (random.standard_normal(2000) * 2.5).astype(np.float32)
        before = step._bounds[-1]
        sampler.sample(logits)
        seen.append(target - (step._bounds[-1] - before) / 0.1)
    assert np.mean(seen[200:]) == pytest.approx(target, abs=0.2)


def test_mirostat_keeps_what_is_not_more_surprising_than_its_bound() -> None:
    step = Mirostat(target=1.0, rate=0.5)
    logits = [math.log(p) for p in (0.5, 0.26, 0.12, 0.12)]
    assert step(make(logits)).ids.tolist() == [0, 1], "2 bits at first"
    step.observe(3.0)  # one bit a token was wanted, so the bound falls by half of two
    assert step(make(logits)).ids.tolist() == [0]
    step.observe(100.0)
    assert step(make(logits)).ids.tolist() == [0], "the best one always stays"


def kinds(**changes: object) -> list[type]:
    return [type(step) for step in Sampler(SamplingParams(**{**NEUTRAL, **changes})).steps]


def test_steps_come_in_the_order_that_is_asked_for() -> None:
    every = {
        "top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7, "top_n_sigma": 1.0,
        "xtc_probability": 0.5,
    }  # fmt: skip
    assert kinds(**every) == [TopNSigma, TopK, TopP, MinP, Xtc, SamplingTemperature]
    assert kinds(**every, samplers=("temperature", "min_p")) == [SamplingTemperature, MinP]
    assert kinds(**every, samplers=SAMPLERS[::-1])[0] is SamplingTemperature
    assert kinds(**{**every, "mirostat": True}) == [SamplingTemperature, Mirostat]
    assert kinds(**{**every, "temperature": 0}) == [], "the best one passes every filter"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"samplers": ("top_k", "magic")}, "'samplers' must be names among penalties, dry"),
        ({"samplers": ("top_k", "top_k")}, "'samplers' must be a list without repetitions"),
        ({"logit_bias": 3}, "'logit_bias' must be numbers by token id"),
        ({"logit_bias": {"a": 1}}, "'logit_bias' must be numbers by token id"),
        ({"logit_bias": ((-1, 1.0),)}, "'logit_bias' must be numbers by token id"),
        ({"logit_bias": ((1, math.nan),)}, "'logit_bias' must be numbers by token id"),
        ({"logit_bias": ((1, math.inf),)}, "'logit_bias' must be numbers by token id"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(EngineError, match=expected):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_biases_from_json_have_texts_as_keys() -> None:
    assert SamplingParams(logit_bias={"5": -2}).logit_bias == ((5, -2.0),)  # type: ignore[arg-type]


@given(VALUES, st.integers(0, 2**32 - 1))
def test_every_step_leaves_a_token_that_may_come(logits: list[int], seed: int) -> None:
    params = SamplingParams(
        seed=seed, temperature=0.8, dry_multiplier=5.0, dry_allowed_length=0, top_n_sigma=0.1,
        xtc_probability=1.0, xtc_threshold=0.0, dynatemp_range=2.0, logit_bias=((0, -math.inf),),
    )  # fmt: skip
    sampler = Sampler(params)
    for _ in range(4):
        token = sampler.sample(np.array(logits, np.float32))
        assert 0 <= token < len(logits)
        assert token > 0 or len(logits) == 1
        sampler.accept(token)
