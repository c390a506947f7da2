"""Sharded sampling by ranks with a slice of the logits each: all get the host's token."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.backends.gpu.decode.sampler_slots import settings_of
from engine.backends.gpu.decode.sampling import (
    DeviceSampler,
    RingEntry,
    message_bytes,
    sampling_starts,
)
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.decoding.sampling.sampler import MAX_SENT, Sampler, most_sent
from engine.sampling_params import SamplingParams
from tests.helpers.device_sampling import (
    GREEDY,
    NEUTRAL,
    PENALTIES,
    SamplerPair,
    random_logits,
    random_params,
)
from tests.helpers.one_shot import Unheard, ranks_of
from tests.helpers.tiers import swept

HALVES = (0, 300, 601)


def random_cuts(random: np.random.Generator, n_rank: int, n_vocab: int) -> list[int]:
    """Return random boundaries of slices; often some slices are empty."""
    ends = random.integers(0, n_vocab + 1, n_rank - 1)
    if random.integers(2):
        ends = ends // 100 * 100
    return [0, *sorted(ends.tolist()), n_vocab]


def equal_hidden_states(n_rank: int) -> list[torch.Tensor | None]:
    hidden = torch.randn(70, generator=torch.Generator().manual_seed(n_rank))
    return [hidden.clone() for _ in range(n_rank)]


def sweep(device: str, n_rank: int, n_settings: int, n_tokens: int, seed: int) -> None:
    random, n_sampled = np.random.default_rng([seed, n_rank]), 0
    for _ in range(n_settings):
        n_vocab = int(random.integers(300, 2000))
        prompt = random.integers(0, n_vocab, 30).tolist()
        never = random.integers(0, n_vocab, 2).tolist()
        cuts = random_cuts(random, n_rank, n_vocab)
        pair = SamplerPair(device, random_params(random), n_vocab, prompt, never, cuts=cuts)
        pair.hidden_states = [
            None if x is None else x.to(device) for x in equal_hidden_states(n_rank)
        ]
        n_sampled += sum(pair.sample(random_logits(random, n_vocab)) for _ in range(n_tokens))
    assert n_sampled > 0.9 * n_settings * n_tokens


@pytest.mark.parametrize("n_rank", swept([2, 3, 5, 8], (3, 8)))
def test_all_ranks_sample_what_the_host_samples(device: str, n_rank: int) -> None:
    sweep(device, n_rank, n_settings=24 // n_rank, n_tokens=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("n_rank", range(2, 9))
def test_thousands_of_samples_are_those_of_the_host(device: str, n_rank: int) -> None:
    sweep(device, n_rank, n_settings=120 // n_rank, n_tokens=8, seed=1)


def test_several_ranks_sample_what_one_does(device: str) -> None:
    random = np.random.default_rng(4)
    params = SamplingParams(seed=9, temperature=1.5, top_k=60, **PENALTIES)
    one = SamplerPair(device, params, 601)
    two, five = (
        SamplerPair(device, params, 601, cuts=cuts) for cuts in (HALVES, (0, 7, 7, 300, 599, 601))
    )
    for _ in range(3):
        logits = random_logits(random, 601)
        assert one.sampled(logits) == two.sampled(logits) == five.sampled(logits)


@pytest.mark.parametrize("cuts", [(0, 0, 33_001), (0, 20_000, 33_001), (0, 1, 2, 33_001)])
def test_slices_of_all_sizes(cuts: Sequence[int], device: str) -> None:
    random = np.random.default_rng(cuts[1])
    for params in (GREEDY, SamplingParams(seed=3), dataclasses.replace(NEUTRAL, top_p=0.7)):
        pair = SamplerPair(device, params, cuts[-1], cuts=cuts)
        pair.sampled((random.standard_normal(cuts[-1]) * 4).astype(np.float32))


@pytest.mark.parametrize("n_rank", [2, 8])
def test_the_largest_top_k(device: str, n_rank: int) -> None:
    params = dataclasses.replace(NEUTRAL, top_k=most_sent(n_rank))
    cuts = [n * 2000 // n_rank for n in range(n_rank + 1)]
    pair, random = SamplerPair(device, params, 2000, cuts=cuts), np.random.default_rng(2)
    for where in (slice(0, 0), slice(0, cuts[1])):  # all of the top-k may be on one rank
        logits = random.standard_normal(2000).astype(np.float32)
        logits[where] += 20
        pair.sampled(logits)


def test_of_equal_ones_the_lowest_is_taken(device: str) -> None:
    logits = np.zeros(601, dtype=np.float32)
    logits[::7] = -0.0
    logits[:298] = -1
    assert SamplerPair(device, GREEDY, 601, cuts=HALVES).sampled(logits) == 298
    pair = SamplerPair(device, dataclasses.replace(NEUTRAL, top_k=5), 601, cuts=HALVES)
    sampled = {pair.sampled(logits) for _ in range(12)}
    assert sampled == set(range(298, 303)), "two on one rank, three on the other"


def test_over_real_one_shots_and_repeated() -> None:
    random = np.random.default_rng(6)
    with ranks_of(2) as ranks:
        one_shots = [ranks.one_shot(seat) for seat in ranks.group]
        params = SamplingParams(seed=5, temperature=2, top_k=12, repeat_last_n=3, **PENALTIES)
        pair = SamplerPair("cpu", params, 50, never=[4], cuts=(0, 20, 50), one_shots=one_shots)
        pair.hidden_states = equal_hidden_states(2)
        pair.sampled(random.standard_normal(50).astype(np.float32))
        pair.capture()
        for _ in range(6):
            pair.sampled(random.standard_normal(50).astype(np.float32))
        assert pair.hidden_states[1] is not None
        pair.hidden_states[1][3] += 1
        assert pair.step(np.zeros(50, np.float32)).wrong == (0, 1)
        assert ranks.one_shots.problem() is None


def test_a_window_of_penalties_moves_over_all_slices(device: str) -> None:
    params = SamplingParams(temperature=0, repeat_last_n=4, presence_penalty=1)
    pair = SamplerPair(device, params, 40, prompt=[0, 1, 2], cuts=(0, 2, 40))
    assert [pair.sampled(np.zeros(40, np.float32)) for _ in range(8)] == [3, 4, 0, 1, 2, 3, 4, 0]


def test_penalties_of_many_tokens(device: str) -> None:
    random = np.random.default_rng(3)
    params = SamplingParams(temperature=1, seed=2, top_k=10, repeat_last_n=5, **PENALTIES)
    pair = SamplerPair(device, params, 50, cuts=(0, 20, 50))
    for _ in range(12):
        pair.sampled(random.standard_normal(50).astype(np.float32))


@pytest.mark.parametrize(
    ("params", "logits"),
    [
        (dataclasses.replace(NEUTRAL, top_p=0.99), np.zeros(3000)),
        (dataclasses.replace(NEUTRAL, min_p=0.9), np.zeros(3000)),
        (dataclasses.replace(NEUTRAL, top_k=40), np.zeros(3000)),
        (GREEDY, [1, math.nan, 2, 2]),
        (GREEDY, [1, 2, 3, math.inf]),
        (GREEDY, [-math.inf, -math.inf, math.nan, -math.inf]),
        (GREEDY, [-math.inf] * 4),
    ],
    ids=["top-p", "min-p", "equal ones", "nan", "inf", "nan only", "nothing"],
)
def test_what_the_host_must_do_changes_nothing(
    params: SamplingParams, logits: Sequence[float], device: str
) -> None:
    n = len(logits)
    pair = SamplerPair(device, params, n, n_step=20, cuts=(0, n // 4, n // 4, n))
    for token in pair.tokens:
        token.fill_(2)
    before = [(x.slots.counts.clone(), x.slots.history.clone()) for x in pair.samplers]
    for usable in (np.asarray(logits, np.float32), np.arange(n, dtype=np.float32)):
        entry = pair.step(usable)
        assert not entry.is_sampled, "nor are later steps"
        assert entry.wrong == ()
        assert (pair.token, pair.position) == (2, 0)
    for (counts, history), device_sampler in zip(before, pair.samplers, strict=True):
        assert torch.equal(device_sampler.slots.counts, counts)
        assert torch.equal(device_sampler.slots.history, history)
    pair.begin()
    pair.sampled(np.arange(n, dtype=np.float32))


def test_a_slice_without_a_token_that_can_come(device: str) -> None:
    logits = np.arange(601, dtype=np.float32)
    logits[300:] = -math.inf
    for params in (GREEDY, dataclasses.replace(NEUTRAL, top_p=0.9)):
        assert SamplerPair(device, params, 601, cuts=HALVES).sampled(logits) in range(295, 300)


def test_tokens_that_must_not_come_may_be_no_numbers(device: str) -> None:
    logits = np.arange(601, dtype=np.float32)
    logits[[298, 600]] = math.nan, math.inf
    pair = SamplerPair(device, GREEDY, 601, prompt=[298] * 5, never=[298, 600], cuts=HALVES)
    assert pair.sampled(logits) == 599


def damaged(pair: SamplerPair, *, seats: Sequence[int], lacking: Sequence[int] = ()) -> RingEntry:
    """Return the entry of a step with hidden states that differ by a bit, so nothing is sampled."""
    for seat, hidden in enumerate(equal_hidden_states(len(pair.slices))):
        assert hidden is not None
        if seat in seats:
            hidden.view(torch.int32)[7 + seat] ^= 1
        pair.hidden_states[seat] = None if seat in lacking else hidden.to(pair.tokens[0].device)
    logits = np.arange(pair.slices[-1].stop, dtype=np.float32)
    entry = pair.step(logits)
    assert not entry.is_sampled
    assert (pair.token, pair.position) == (0, 0)
    later = pair.step(logits)
    assert later.wrong == entry.wrong, "whenever the host looks"
    return entry


@pytest.mark.parametrize(
    ("n_rank", "seats", "lacking", "named"),
    [
        (2, [1], [], (0, 1)),
        (3, [1], [], (1,)),
        (3, [0], [2], (0, 1)),
        (4, [3], [], (3,)),
        (4, [0, 2], [], (0, 1, 2, 3)),
        (5, [4], [0], (4,)),
        (8, [5], [], (5,)),
    ],
)
def test_who_computes_with_other_numbers_is_named(
    n_rank: int, seats: list[int], lacking: list[int], named: tuple[int, ...], device: str
) -> None:
    cuts = [0, *range(10, 10 * n_rank, 10), 10 * n_rank + 1]
    pair = SamplerPair(device, GREEDY, cuts[-1], cuts=cuts)
    assert damaged(pair, seats=seats, lacking=lacking).wrong == named


def test_ranks_that_follow_another_token_or_step_are_named(device: str) -> None:
    logits = np.zeros(30, np.float32)
    for wrong in ("token", "step"):
        pair = SamplerPair(device, GREEDY, 30, cuts=(0, 10, 20, 30))
        if wrong == "token":
            pair.tokens[1].fill_(5)
        else:
            pair.samplers[1].slots.state[0] += 16  # at the same place of the ring
        pair.n_step += 1
        entries = pair.on_all(lambda n, d=pair: d.step_of(n, logits))
        assert {entry.wrong for entry in entries} == {(1,)}


def test_messages_that_did_not_come_sample_nothing(device: str) -> None:
    """A one-shot all-reduce that gave up still holds the messages of the round before."""

    class Deaf(Unheard):
        def words(self, own: torch.Tensor) -> torch.Tensor:
            return torch.full((2, own.numel()), -1, dtype=torch.int32, device=own.device)

    device_sampler = DeviceSampler(torch.device(device), 20, range(10), Deaf(2))
    place = torch.zeros(1, dtype=torch.int64, device=device)
    device_sampler.sample(torch.zeros(10, device=device), place, place.clone())
    entry = RingEntry.of(int(device_sampler.ring[0]))
    assert (entry.is_sampled, entry.wrong, int(place)) == (False, (0,), 0)


@pytest.mark.parametrize("n_embd", [1, 64, 5000])
def test_the_check_sees_each_number_and_its_place(n_embd: int, device: str) -> None:
    device_sampler = DeviceSampler(torch.device(device), 4, range(2), Unheard(2))
    place = torch.zeros(1, dtype=torch.int64, device=device)

    def check(hidden: torch.Tensor) -> int:
        class Echo(Unheard):
            def words(self, own: torch.Tensor) -> torch.Tensor:
                return own.expand(2, -1).contiguous()

        device_sampler._one_shot = Echo(2)
        device_sampler.sample(
            torch.zeros(2, device=device), place, place.clone(), hidden.to(device)
        )
        return int(device_sampler._message[1])

    hidden = torch.randn(n_embd)
    found = {check(hidden)}
    for n in {0, n_embd // 2, n_embd - 1}:
        changed = hidden.clone()
        changed.view(torch.int32)[n] ^= 1 << 31 if n == 0 else 1
        found.add(check(changed))
    if n_embd > 1:
        found.add(check(hidden.flip(0)))
    assert len(found) == 1 + len({0, n_embd // 2, n_embd - 1}) + (n_embd > 1)
    assert check(hidden) in found
    ends = [torch.full((n_embd,), x) for x in (math.nan, -math.nan)]
    assert check(ends[0]) == check(ends[1]), "the payload of a NaN means nothing"


@pytest.mark.parametrize(
    ("n_rank", "n_bytes"), [(1, 0), (2, 2080), (4, 2080), (5, 1056), (8, 1056)]
)
def test_what_is_told_is_small(n_rank: int, n_bytes: int) -> None:
    assert message_bytes(n_rank) == n_bytes
    if n_rank > 1:
        cuts = [n * 5 for n in range(n_rank + 1)]
        pair = SamplerPair("cpu", GREEDY, cuts[-1], cuts=cuts)
        pair.step(np.zeros(cuts[-1], np.float32))
        assert {one_shot.n_bytes for one_shot in pair.one_shots} == {n_bytes}


def test_all_ranks_start_the_same_few_kernels() -> None:
    started: list[str] = []

    def note(start: KernelLaunch) -> bool:
        started.append(start.kernel.__name__)
        return False

    place = torch.empty(1, dtype=torch.int64, device="meta")
    for own in (range(100, 150_001), range(100, 100)):
        logits = torch.empty(len(own), device="meta") if own else None
        with intercept_launches(note):
            device_sampler = DeviceSampler(torch.device("meta"), 150_001, own, Unheard(3))
            device_sampler.sample(logits, place, place, torch.empty(4096, device="meta"))
    assert started == ["survey", "bound", "offer", "decide"] * 2, "and the exchange's own"


def test_they_are_known_without_memory() -> None:
    starts = sampling_starts(150_000, range(50_000), 3, n_embd=4096)
    names = [start.kernel.__name__ for start in starts]
    assert names == ["survey", "bound", "offer", "all_words", "decide"]
    n_bytes = [
        DeviceSampler(torch.device("meta"), 150_000, own, Unheard(3)).n_bytes
        for own in (range(50_000), range(0))
    ]
    assert n_bytes[0] < 2**19, "of a slice, not of the vocabulary"
    assert n_bytes[1] < 2**16


@pytest.mark.parametrize(
    ("changes", "n_rank", "is_served"),
    [
        ({"top_k": MAX_SENT}, 2, True),
        ({"top_k": MAX_SENT + 1}, 2, False),
        ({"top_k": 128}, 8, True),
        ({"top_k": 129}, 8, False),
        ({"top_k": 0}, 8, True),
        ({"top_k": 10**6, "temperature": 0}, 8, True),
    ],
)
def test_what_is_served(changes: dict[str, float], n_rank: int, is_served: bool) -> None:
    assert (settings_of(Sampler(SamplingParams(**changes)), 5000, n_rank) is not None) == is_served
