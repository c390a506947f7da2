"""Reasons for a choice: the sentences for each kind of outcome."""

from typing import Any

from engine import GOALS, LoadParams, Speeds
from engine.planning.choice import reason_for_choice
from engine.planning.search.estimate import Alternative

CHAT = GOALS["chat"]
ONE, TWO, FOUR = (tuple(f"cuda:{i}" for i in range(n)) for n in (1, 2, 4))
MEMORY = "limited by memory bandwidth"


def split(
    devices: tuple[str, ...], decode_ts: float, mode: str = "tensor", *, prefill_ts: float = 2000,
    n_sum: int = 0, sum_us: float = 0, why: str = MEMORY, **more: Any,
) -> Alternative:  # fmt: skip
    """Return an alternative with these predicted speeds."""
    params = LoadParams("m.gguf", devices, split_mode=mode, **more)
    seconds = CHAT.seconds(prefill_ts, decode_ts)
    speeds = Speeds(float(prefill_ts), float(decode_ts))
    link_s = n_sum * sum_us / 1e6
    return Alternative(params, speeds, seconds, n_sum, sum_us / 1e6, link_s, "", why)


def told(*found: Alternative, gpus: tuple[str, ...] = TWO) -> str:
    """Return the reason for choosing the first one."""
    return reason_for_choice(found[0], sorted(found, key=lambda one: one.seconds), gpus)


def test_one_since_sums_take_longer_than_they_save() -> None:
    alone, both = split(ONE, 61.2), split(TWO, 48.1, n_sum=96, sum_us=70)
    assert told(alone, both) == (
        "GPU 0 alone: 61 tok/s. Split over both: 48, because each token waits 96 × 70 µs for "
        "the other GPU."
    )


def test_one_since_the_other_is_waited_for() -> None:
    why = "because GPU 1 is slowest; the others wait for it 62 % of the time"
    slow = split(TWO, 30, n_sum=96, sum_us=13, why=why)
    assert told(split(ONE, 61), slow).endswith(f"Split over both: 30, {why}.")


def test_one_since_there_is_too_little_to_gain() -> None:
    alone, both = split(ONE, 61), split(TWO, 64, n_sum=96, sum_us=13)
    assert told(alone, both).endswith("Split over both: 64, too small a gain for a second GPU.")
    four = split(FOUR, 60, prefill_ts=9000, n_sum=96, sum_us=13)
    assert told(alone, four, gpus=FOUR).endswith(
        ". Split over all 4 GPUs: 60; only prompt processing would gain from 3 more GPUs."
    )


def test_one_since_prompts_would_lose_more_than_answers_gain() -> None:
    both = split(TWO, 63, prefill_ts=200, n_sum=96, sum_us=13)
    assert told(split(ONE, 61), both).endswith(
        "Split over both: 63, but prompts are processed at 200 tok/s instead of 2000."
    )


def test_one_since_there_is_no_other() -> None:
    assert told(split(ONE, 9.14), gpus=ONE) == "GPU 0 is the only GPU, and the model fits on it."
    assert "No split over several GPUs fits." in told(split(ONE, 61))


def test_several_since_that_is_faster_than_one() -> None:
    both, alone = split(TWO, 84, n_sum=64, sum_us=13), split(ONE, 61)
    assert told(both, alone, gpus=FOUR) == (
        "Split by tensor over GPU 0 and GPU 1: 84 tok/s; GPU 0 alone: 61. Each GPU reads only "
        "part of the weights, which pays off although each token waits 64 × 13 µs for the other "
        "GPU."
    )
    layers, slow = split(TWO, 40, "layer"), split(("cuda:1",), 20)
    assert told(layers, slow) == (
        "By layer over both: 40 tok/s; GPU 1 alone: 20, as only the slower GPU has room for the "
        "whole model."
    )


def test_several_since_none_holds_the_model() -> None:
    tensor, layer = split(TWO, 31, n_sum=160, sum_us=14), split(TWO, 17, "layer")
    assert told(tensor, layer) == (
        "No single GPU can hold the model. Split by tensor over both: 31 tok/s. By layer: 17.0, "
        "because only one GPU computes at a time."
    )
    slow = split(TWO, 139, n_sum=60, sum_us=40)
    assert told(split(TWO, 197, "layer"), slow) == (
        "No single GPU can hold the model. By layer over both: 197 tok/s. Split by tensor: 139, "
        "because each token waits 60 × 40 µs for the other GPU."
    )
    assert told(tensor) == "No single GPU can hold the model. Split by tensor over both: 31 tok/s."


def test_groups_and_what_they_are_compared_with() -> None:
    pairs = split(FOUR, 40, "groups", groups=(2, 2), n_sum=96, sum_us=5)
    whole = split(FOUR, 20, n_sum=96, sum_us=400)
    assert told(pairs, whole, gpus=FOUR) == (
        "No single GPU can hold the model. In groups of 2 + 2 over all 4 GPUs: 40 tok/s. Split by "
        "tensor: 20, because each token waits 96 × 400 µs for the other GPUs."
    )
    better = split(FOUR, 60, n_sum=96, sum_us=5)
    assert told(better, pairs, gpus=FOUR).endswith(
        "In groups of 2 + 2: 40, because only one group computes at a time."
    )


def test_fewer_of_many_and_more_of_few() -> None:
    two, four = split(TWO, 31, n_sum=96, sum_us=14), split(FOUR, 33, n_sum=96, sum_us=20)
    assert told(two, four, gpus=FOUR).endswith(
        "31 tok/s. Over all 4 GPUs: 33, too small a gain for more GPUs."
    )
    assert told(split(FOUR, 50, n_sum=96, sum_us=20), two, gpus=(*FOUR, "cuda:4")).endswith(
        "Split by tensor over 4 GPUs: 50 tok/s. Over GPU 0 and GPU 1: 31."
    )


def test_the_cpu_takes_what_is_left() -> None:
    alone = split(("cpu",), 2.14)
    moved = split(ONE, 5, n_cpu_blocks=12)
    assert told(moved, alone, gpus=ONE) == (
        "GPU 0 is too small, so 12 blocks are on the CPU: 5.0 tok/s. The CPU alone: 2.1."
    )
    experts = split(FOUR, 16, n_cpu_moe=19)
    assert told(experts, gpus=FOUR) == (
        "The 4 GPUs are too small, so the experts of 19 blocks are on the CPU: 16.0 tok/s."
    )
    assert told(alone, split(ONE, 1, n_cpu_blocks=70), gpus=ONE) == (
        "The CPU alone: 2.1 tok/s. With GPU 0, which has room for only a part: 1.0."
    )


def test_the_cpu_by_itself() -> None:
    alone = split(("cpu",), 2.14)
    assert told(alone, gpus=()) == "The CPU alone, as there is no GPU."
    assert told(alone, gpus=ONE) == "The CPU alone: 2.1 tok/s. GPU 0 has too little memory to help."


def test_nothing_fits() -> None:
    reason = reason_for_choice(None, (), TWO)
    assert reason == "The model does not fit on any device with this context."
