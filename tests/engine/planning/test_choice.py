"""The default split, on rigs whose fastest split is known.

Published speeds decide: all-reduces take about 13 µs by host memory and 40 by NCCL, with which two
cards are faster than one for a dense model of 8 billion weights but not for one whose tokens use 3
billion (llama.cpp#19378: such a model runs at 0.7 of its speed when each block is cut over four
cards without peer access; ik_llama.cpp#1057: 70 billion dense weights run twice as fast).
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine import GOALS, EngineError, Forecaster, LoadParams, Planner, parse_rig
from engine.planning.choice import MIN_GAIN, Choice, choose
from engine.planning.speed.facts import LinkFacts
from engine.planning.speed.links import Links
from tests.helpers.hollow import hollow_llama, hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

GIB = 1 << 30
MODELS: dict[str, Callable[[Path], Path]] = {
    "8b": hollow_llama,
    "32b": lambda path: hollow_llama(path, n_layer=64, n_embd=5120, n_head=40, n_ff=27648),
    "70b": lambda path: hollow_llama(path, n_layer=80, n_embd=8192, n_head=64, n_ff=28672),
    "a3b": lambda path: hollow_moe(
        path, n_layer=48, n_embd=2048, n_head=16, n_head_kv=4, n_ff_exp=768
    ),
    "moe": lambda path: hollow_moe(path, n_layer=12),
}
"""Models by name: as Llama 3 8B and 70B, a dense one that needs two small cards, Qwen 3 30B-A3B,
and 33 GiB of experts."""


@pytest.fixture(scope="module")
def planners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Planner]:
    folder = tmp_path_factory.mktemp("choice")
    return {name: Planner(make(folder / f"{name}.gguf")) for name, make in MODELS.items()}


Chosen = Callable[..., Choice]


@pytest.fixture
def chosen(planners: dict[str, Planner]) -> Chosen:
    """Return a function that chooses the split of a model on a rig."""

    def on(model: str, rig: str, *, goal: str = "chat", **changes: object) -> Choice:
        planner, forecaster = planners[model], Forecaster.of_rig(parse_rig(rig))
        params = replace(LoadParams(planner.info.path, n_ctx=4096), **changes)
        choice = choose(planner, params, forecaster, GOALS[goal])
        free = forecaster.free_bytes
        if choice.alternatives:
            assert not planner.plan(choice.params, free).shortages(free)
            assert choice.params in [one.params for one in choice.alternatives]
            seconds = [one.seconds for one in choice.alternatives]
            assert seconds == sorted(seconds)
        assert choice.reason[0].isupper()
        assert choice.reason.endswith(".")
        assert choice.reason.count(". ") <= 2, "at most three short sentences"
        return choice

    return on


def speed(choice: Choice, mode: str, n: int) -> float:
    """Return the tokens/s of the best alternative over n devices in a mode."""
    found = [
        one
        for one in choice.alternatives
        if (one.params.split_mode, len(one.params.all_devices)) == (mode, n)
    ]
    return max(one.speeds.decode_ts for one in found)


@pytest.mark.parametrize("card", ["3090", "4090", "5090"])
@pytest.mark.parametrize("way", ["host", "p2p"])
def test_a_dense_model_is_cut_over_two_cards(chosen: Chosen, card: str, way: str) -> None:
    choice = chosen("8b", f"2x{card}@{way}")
    assert choice.params.devices == ("cuda:0", "cuda:1")
    assert (choice.params.split_mode, choice.params.split) == ("tensor", None)
    assert speed(choice, "tensor", 2) > 1.1 * speed(choice, "tensor", 1)
    assert choice.reason.startswith("Split by tensor over both: ")
    assert "each token waits 64 × " in choice.reason
    assert "GPU 0 alone: " in choice.reason


def test_a_bridge_is_better_than_none(chosen: Chosen) -> None:
    rates = [speed(chosen("8b", f"2x3090@{way}"), "tensor", 2) for way in ("nvlink", "p2p", "host")]
    assert rates == sorted(rates, reverse=True)


def test_slow_sums_leave_a_model_on_one_card(chosen: Chosen) -> None:
    """The break-even of a model of 8 billion weights on a 5090 is 25 µs."""
    choice = chosen("8b", "2x5090@shm")
    assert choice.params.devices == ("cuda:0",)
    assert choice.params.split is None
    assert choice.reason.startswith("GPU 0 alone: ")
    assert ". Split over both: " in choice.reason
    assert "because each token waits 64 × " in choice.reason
    assert choice.reason.endswith(" µs for the other GPU.")


BREAK_EVEN = (("8b", "3090", 45e-6), ("8b", "5090", 25e-6), ("a3b", "3090", 12.8e-6))
"""Model, card, and seconds of an all-reduce with which two cards are about as fast as one: half a
token's bytes over the bandwidth and the number of all-reduces."""


@pytest.mark.parametrize(("model", "card", "sum_s"), BREAK_EVEN)
def test_two_cards_are_taken_where_sums_are_well_below_the_break_even(
    planners: dict[str, Planner], model: str, card: str, sum_s: float
) -> None:
    rig, planner = parse_rig(f"2x{card}"), planners[model]
    taken = []
    for part in (0.4, 1.1):
        links = Links({}, LinkFacts(part * sum_s, 1e12))
        forecaster = Forecaster(rig.devices, rig.facts, links)
        choice = choose(planner, LoadParams(planner.info.path, n_ctx=4096), forecaster)
        taken.append(len(choice.params.devices))
    assert taken == [2, 1]


@pytest.mark.parametrize("rig", ["2x4090", "2x4090@shm", "4x4090@shm", "2x5090", "8x3090@shm"])
def test_a_model_with_few_active_weights_stays_on_one_card(chosen: Chosen, rig: str) -> None:
    choice = chosen("a3b", rig)
    assert choice.params.devices == ("cuda:0",)
    assert len({len(one.params.devices) for one in choice.alternatives}) > 1, "others were tried"


def test_a_model_with_few_active_weights_that_needs_two_cards_may_be_cut_by_layer(
    chosen: Chosen,
) -> None:
    """llama.cpp#19378: cutting every block is slower than whole blocks where all-reduces are."""
    choice = chosen("a3b", "2x4080@shm")
    assert choice.params.devices == ("cuda:0", "cuda:1")
    assert choice.params.split_mode == "layer"
    assert speed(choice, "tensor", 2) < 0.9 * speed(choice, "layer", 2)
    assert choice.reason.startswith("No single GPU can hold the model. By layer over both: ")
    assert "because each token waits 96 × " in choice.reason


def test_a_large_dense_model_is_cut_over_all_of_four_cards(chosen: Chosen) -> None:
    """It gains as published: about twice the speed of a split by layer."""
    choice = chosen("70b", "4x3090@p2p")
    assert len(choice.params.devices) == 4
    assert choice.params.split_mode == "tensor"
    assert 45 < speed(choice, "tensor", 4) < 70
    assert choice.reason.startswith(
        "No single GPU can hold the model. Split by tensor over all 4 GPUs"
    )


def test_a_large_dense_model_on_two_cards(chosen: Chosen) -> None:
    choice = chosen("70b", "2x5090")
    assert choice.params.split_mode == "tensor"
    assert speed(choice, "tensor", 2) > 1.4 * speed(choice, "layer", 2)
    assert ". By layer: " in choice.reason
    assert choice.reason.endswith(", because only one GPU computes at a time.")


def test_a_slow_card_is_left_out_where_it_brings_little(chosen: Chosen) -> None:
    """The order of the cards does not matter."""
    for rig, fast in (("4090,3060", "cuda:0"), ("3060,4090", "cuda:1")):
        choice = chosen("8b", rig)
        assert choice.params.devices == (fast,)
        assert f"GPU {fast[-1]} alone: " in choice.reason


def test_cards_of_different_size_and_speed_get_different_shares(chosen: Chosen) -> None:
    choice = chosen("32b", "4090,3060")
    split = choice.params.split
    assert choice.params.devices == ("cuda:0", "cuda:1")
    assert split is not None
    assert split[0] > 1.8 * split[1]
    four = chosen("70b", "2x4090,2x3060@p2p")
    shares = four.params.split
    assert shares is not None
    assert shares[0] == shares[1] > 2 * shares[2] == 2 * shares[3]


@pytest.mark.parametrize("n", [3, 5])
def test_odd_numbers_of_cards(chosen: Chosen, n: int) -> None:
    """Eight key-value heads do not divide evenly; a large model is faster nevertheless."""
    choice = chosen("70b", f"{n}x3090@p2p")
    assert choice.params.devices == tuple(f"cuda:{i}" for i in range(n))
    assert choice.params.split_mode == "tensor"


def test_the_fewest_cards_of_those_that_are_about_as_fast(chosen: Chosen) -> None:
    choice = chosen("8b", "8x3090@host")
    best = choice.alternatives[0]
    taken = next(one for one in choice.alternatives if one.params == choice.params)
    near = (1 - MIN_GAIN) * taken.seconds <= best.seconds
    assert near or taken.speeds.decode_ts >= (1 - MIN_GAIN) * best.speeds.decode_ts
    for one in choice.alternatives:
        if len(one.params.devices) < len(taken.params.devices):
            assert (1 - MIN_GAIN) * one.seconds > best.seconds
            assert one.speeds.decode_ts < (1 - MIN_GAIN) * best.speeds.decode_ts


def test_too_little_gain_is_said(chosen: Chosen) -> None:
    choice = chosen("8b", "4090,3060")
    assert choice.params.devices == ("cuda:0",)
    assert choice.alternatives[0].params.devices == ("cuda:0", "cuda:1")
    assert choice.reason.endswith(", too small a gain for a second GPU.")


def test_many_cards_are_grouped_where_sums_over_all_are_slow(planners: dict[str, Planner]) -> None:
    """Bridged pairs, between which values pass by the host very slowly."""
    rig = parse_rig("4x3060")
    fast, slow = LinkFacts(5e-6, 50e9), LinkFacts(400e-6, 1e9)
    pairs = {(f"cuda:{a}", f"cuda:{b}"): slow for b in range(4) for a in range(b)}
    pairs |= {("cuda:0", "cuda:1"): fast, ("cuda:2", "cuda:3"): fast}
    planner = planners["moe"]
    choice = choose(
        planner,
        LoadParams(planner.info.path, n_ctx=2048),
        Forecaster(rig.devices, rig.facts, Links(pairs, slow)),
    )
    assert choice.params.group_sizes == (2, 2)
    assert "In groups of 2 + 2" in choice.reason


def test_of_equal_cards_those_with_the_best_link_are_taken(planners: dict[str, Planner]) -> None:
    rig = parse_rig("4x4090")
    fast, slow = LinkFacts(5e-6, 50e9), LinkFacts(100e-6, 1e9)
    planner = planners["8b"]
    choice = choose(
        planner,
        LoadParams(planner.info.path, n_ctx=2048),
        Forecaster(rig.devices, rig.facts, Links({("cuda:1", "cuda:3"): fast}, slow)),
    )
    assert choice.params.devices == ("cuda:1", "cuda:3")
    assert "over GPU 1 and GPU 3" in choice.reason


def test_the_only_card(chosen: Chosen) -> None:
    choice = chosen("8b", "3090")
    assert choice.params.devices == ("cuda:0",)
    assert choice.reason.startswith("GPU 0 is the only GPU, and the model fits on it.")


def test_what_cards_cannot_hold_goes_to_the_cpu(chosen: Chosen) -> None:
    dense, routed = chosen("70b", "3090"), chosen("a3b", "3060")
    assert dense.params.devices == routed.params.devices == ("cuda:0",)
    assert dense.params.n_cpu_blocks > 0
    assert routed.params.n_cpu_moe > 0
    blocks = f"{dense.params.n_cpu_blocks} blocks are on the CPU: "
    assert dense.reason.startswith(f"GPU 0 is too small, so {blocks}")
    assert f"the experts of {routed.params.n_cpu_moe} blocks are on the CPU: " in routed.reason
    for choice in (dense, routed):
        assert ". The CPU alone: " in choice.reason


def test_the_cpu_alone(chosen: Chosen) -> None:
    choice = chosen("8b", "7950x")
    assert choice.params.devices == ("cpu",)
    assert choice.reason.startswith("The CPU alone, as there is no GPU.")


def test_where_nothing_fits_that_is_said(chosen: Chosen, planners: dict[str, Planner]) -> None:
    choice = chosen("70b", "3060", n_ctx=131072, kv_type="f32")
    assert choice.alternatives == ()
    assert choice.reason == "The model does not fit on any device with this context."
    planners["70b"].plan(choice.params)


def test_memory_that_others_take_counts(chosen: Chosen, planners: dict[str, Planner]) -> None:
    """The reserve counts, too."""
    kept = chosen("8b", "2x5090@shm", reserve=(("cuda:0", 30 * GIB),))
    assert kept.params.devices == ("cuda:1",)
    planner, forecaster = planners["8b"], Forecaster.of_rig(parse_rig("2x5090@shm"))
    free = forecaster.free_bytes | {"cuda:0": 2 * GIB}
    params = LoadParams(planner.info.path, n_ctx=4096)
    assert choose(planner, params, forecaster, free_bytes=free).params.devices == ("cuda:1",)


def test_prompts_that_count_are_a_reason_for_more_cards(chosen: Chosen) -> None:
    """For long documents another card may pay that does nothing for answers."""
    chat, prompts = chosen("a3b", "2x3090"), chosen("a3b", "2x3090", goal="prompts")
    assert chat.params.devices == ("cuda:0",)
    assert len(prompts.params.devices) == 2


def test_without_a_device_nothing_can_be_chosen(planners: dict[str, Planner]) -> None:
    planner = planners["8b"]
    nowhere = Forecaster([], {}, Links({}))
    with pytest.raises(EngineError, match="no device"):
        choose(planner, LoadParams(planner.info.path), nowhere)


@pytest.mark.parametrize("rig", ["7950x", "2x3090"])
def test_what_cannot_be_run_is_an_error_and_not_too_large(tmp_path: Path, rig: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", head_dim=16)
    with closing(Planner(path)) as planner, pytest.raises(EngineError, match="Q8_0"):
        choose(planner, LoadParams(str(path), kv_type="q8_0"), Forecaster.of_rig(parse_rig(rig)))


@pytest.mark.parametrize("model", ["8b", "70b", "a3b", "moe"])
@pytest.mark.parametrize("rig", ["8x3090", "4x4090,4x3060"])
def test_eight_cards_take_well_below_a_tenth_of_a_second(
    planners: dict[str, Planner], model: str, rig: str
) -> None:
    """The better of two runs counts, each with a planner that has kept nothing of this rig."""
    seconds = []
    for _ in range(2):
        planner, forecaster = Planner(planners[model].info.path), Forecaster.of_rig(parse_rig(rig))
        params = LoadParams(planner.info.path, n_ctx=4096)
        planner.plan(params)
        start = time.thread_time()
        choose(planner, params, forecaster)
        seconds.append(time.thread_time() - start)
        planner.close()
    assert min(seconds) < 0.1
