"""Tokens sampled by kernels against the host's sampler, with the same random numbers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.gpu.decode import sampling
from engine.backends.gpu.decode.sampler_slots import settings_of
from engine.backends.gpu.decode.sampling import DeviceSampler, sampling_starts
from engine.decoding.sampling.sampler import MAX_WANTED, Sampler, why_on_host
from engine.decoding.sampling.slices import n_candidates
from engine.decoding.sampling.steps import MinP, TopK
from engine.sampling_params import SAMPLERS, SamplingParams
from tests.helpers.device_sampling import (
    GREEDY,
    NEUTRAL,
    PENALTIES,
    SamplerPair,
    random_logits,
    random_params,
)


def sweep(device: str, n_settings: int, n_tokens: int, seed: int) -> None:
    random, n_sampled = np.random.default_rng(seed), 0
    for _ in range(n_settings):
        n_vocab = int(random.integers(300, 2000))
        prompt = random.integers(0, n_vocab, 30).tolist()
        never = random.integers(0, n_vocab, 2).tolist()
        pair = SamplerPair(device, random_params(random), n_vocab, prompt, never)
        n_sampled += sum(pair.sample(random_logits(random, n_vocab)) for _ in range(n_tokens))
    assert n_sampled > 0.9 * n_settings * n_tokens


def test_samples_are_those_of_the_host(device: str) -> None:
    sweep(device, n_settings=16, n_tokens=8, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_thousands_of_samples_are_those_of_the_host(device: str, seed: int) -> None:
    sweep(device, n_settings=40, n_tokens=12, seed=seed)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=3), dataclasses.replace(NEUTRAL, min_p=0.1)],
    ids=["greedy", "default", "by id"],
)
@pytest.mark.parametrize("n_vocab", [1, 2, 1024, 8193, 33_000])
def test_vocabularies_of_all_sizes(n_vocab: int, params: SamplingParams, device: str) -> None:
    pair = SamplerPair(device, params, n_vocab)
    random = np.random.default_rng(n_vocab)
    for scale in (2, 4):
        pair.sampled((random.standard_normal(n_vocab) * scale).astype(np.float32))


def test_the_largest_top_k(device: str) -> None:
    pair = SamplerPair(device, dataclasses.replace(NEUTRAL, top_k=MAX_WANTED), 5000)
    random = np.random.default_rng(2)
    for _ in range(3):
        pair.sampled(random.standard_normal(5000).astype(np.float32))


def test_of_equal_ones_the_lowest_is_taken(device: str) -> None:
    logits = np.zeros(600, dtype=np.float32)
    logits[::7] = -0.0
    logits[:3] = -1
    assert SamplerPair(device, GREEDY, 600).sampled(logits) == 3
    pair = SamplerPair(device, dataclasses.replace(NEUTRAL, top_k=5), 600)
    sampled = {pair.sampled(logits) for _ in range(12)}
    assert sampled <= set(range(3, 8))


def test_a_window_of_penalties_moves(device: str) -> None:
    """Greedy from equal logits with a presence penalty cycles through a window."""
    params = SamplingParams(temperature=0, repeat_last_n=4, presence_penalty=1)
    pair = SamplerPair(device, params, 40, prompt=[0, 1, 2])
    assert [pair.sampled(np.zeros(40, np.float32)) for _ in range(8)] == [3, 4, 0, 1, 2, 3, 4, 0]


def test_more_random_numbers_than_there_is_room_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "N_UNIFORM", 8)
    pair = SamplerPair(device, dataclasses.replace(NEUTRAL, top_k=64), 64)
    for _ in range(30):
        pair.sampled(np.zeros(64, np.float32))


def test_the_host_goes_on_where_the_device_stopped_and_back(device: str) -> None:
    random = np.random.default_rng(7)
    pair = SamplerPair(device, SamplingParams(seed=5, temperature=2, **PENALTIES), 500)
    for _ in range(3):
        for _ in range(2):
            pair.sampled(random_logits(random, 500))
        logits = random_logits(random, 500)
        token = pair.host.sample(logits)
        assert pair.followed.sample(logits) == token
        pair.accept(token)
        pair.begin()


@pytest.mark.parametrize(
    ("params", "logits"),
    [
        (dataclasses.replace(NEUTRAL, top_p=0.99), np.zeros(3000)),
        (dataclasses.replace(NEUTRAL, min_p=0.9), np.zeros(3000)),
        (dataclasses.replace(NEUTRAL, top_k=40), np.zeros(3000)),
        (NEUTRAL, [1, math.nan, 2]),
        (NEUTRAL, [1, math.inf, 2]),
        (GREEDY, [-math.inf, math.nan, -math.inf]),
        (GREEDY, [-math.inf] * 3),
    ],
    ids=["top-p", "min-p", "equal ones", "nan", "inf", "greedy nan", "nothing"],
)
def test_what_the_host_must_do_changes_nothing(
    params: SamplingParams, logits: Sequence[float], device: str
) -> None:
    served = params if params != NEUTRAL else dataclasses.replace(NEUTRAL, top_k=2)
    pair = SamplerPair(device, served, len(logits), n_step=20)
    pair.tokens[0].fill_(2)
    (device_sampler,) = pair.samplers
    slots = device_sampler.slots
    before = [x.clone() for x in (slots.counts, slots.history)]
    for usable in (np.asarray(logits, np.float32), np.arange(len(logits), dtype=np.float32)):
        assert not pair.step(usable).is_sampled, "nor are later steps"
        assert (pair.token, pair.position) == (2, 0)
    for x, y in zip(before, (slots.counts, slots.history), strict=True):
        assert torch.equal(x, y)
    pair.begin()
    pair.sampled(np.arange(len(logits), dtype=np.float32))


def test_tokens_that_must_not_come_may_be_no_numbers(device: str) -> None:
    logits = np.arange(300, dtype=np.float32)
    logits[[298, 299]] = math.nan, math.inf
    pair = SamplerPair(device, GREEDY, 300, prompt=[299] * 5, never=[298, 299])
    assert pair.sampled(logits) == 297


@pytest.mark.parametrize(
    ("changes", "is_served"),
    [
        ({}, True),
        ({"top_k": 0}, True),
        ({"top_k": 0, "top_p": 1.0}, True),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, False),
        ({"top_k": MAX_WANTED + 1}, False),
        ({"typical_p": 0.9}, False),
        ({"typical_p": 0.9, "temperature": 0}, True),
        ({"repeat_last_n": 10**6}, True),
        ({"repeat_last_n": 10**6, "repeat_penalty": 1.1}, False),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, True),
    ],
)
def test_what_is_served(changes: dict[str, float], is_served: bool) -> None:
    params = SamplingParams(**changes)
    assert (settings_of(Sampler(params), 5000) is not None) == is_served
    device_sampler = DeviceSampler(torch.device("cpu"), 5000)
    assert device_sampler.begin(Sampler(params), [], 0) == is_served


@pytest.mark.parametrize("n_rank", [1, 2])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "random"])
def test_a_step_that_no_kernel_computes_is_left_to_the_host(
    params: SamplingParams, n_rank: int
) -> None:
    """Steps derived from known ones, and known ones in another order, are also left to the host."""

    class Reversed(TopK):
        """A made-up step."""

    for steps in ([Reversed(3)], [lambda candidates: candidates], [MinP(0.1), TopK(2)]):
        sampler = Sampler(params)
        assert settings_of(sampler, 5000, n_rank) is not None
        sampler.steps += steps
        assert settings_of(sampler, 5000, n_rank) is None
        device_sampler = DeviceSampler(torch.device("cpu"), 5000)
        assert not device_sampler.begin(sampler, [], 0)


def test_no_setting_is_overlooked() -> None:
    """A new setting must be handled in `settings_of`, then listed here."""
    drawn_with = {
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n",
        "frequency_penalty", "presence_penalty", "seed",
    }  # fmt: skip
    by_host = {
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n", "dry_breakers",
        "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
        "mirostat", "mirostat_tau", "mirostat_eta", "logit_bias", "samplers",
    }  # fmt: skip
    ends_answers = {"max_tokens", "stop", "ignore_eos", "on_overflow"}
    watched_by_generation = {"banned_strings", "json_schema", "grammar", "regex"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == drawn_with | by_host | ends_answers | watched_by_generation


@pytest.mark.parametrize(
    "changes",
    [
        {"dry_multiplier": 0.8}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5},
        {"dynatemp_range": 0.5}, {"mirostat": True}, {"logit_bias": ((3, -1.0),)},
        {"samplers": SAMPLERS[:-1]}, {"samplers": SAMPLERS[::-1]},
    ],
    ids=str,
)  # fmt: skip
def test_what_kernels_do_not_compute_is_left_to_the_host(changes: dict[str, Any]) -> None:
    """Also with settings that would be served if they had no effect."""
    sampler = Sampler(SamplingParams(**changes))
    assert settings_of(sampler, 5000) is None
    assert n_candidates(sampler, 5000) is None
    assert "do not support a sampling setting" in why_on_host(sampler, 5000)


def test_a_small_vocabulary_is_served_with_any_top_k() -> None:
    assert settings_of(Sampler(SamplingParams(top_k=10**6)), MAX_WANTED) is not None


def test_without_memory_the_starts_are_known() -> None:
    names = [start.kernel.__name__ for start in sampling_starts(150_000)]
    assert names == ["survey", "bound", "gather", "draw"]
    assert DeviceSampler(torch.device("meta"), 150_000).n_bytes < 2**21
