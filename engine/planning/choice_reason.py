"""Why a split was chosen, in a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.devices.types import CPU
from engine.planning.search.results import names

if TYPE_CHECKING:
    from engine.planning.alternative import Alternative

MOST_NAMED = 3
"""More GPUs are counted, not named."""


def explained(
    chosen: Alternative | None, alternatives: Sequence[Alternative], gpus: Sequence[str]
) -> str:
    """The reason.

    Args:
        chosen: None where nothing fits.
        alternatives: all that was predicted, the fastest first.
        gpus: all that there are.
    """
    if chosen is None:
        return "Nothing here has room for the model with this context."
    others = [one for one in alternatives if one is not chosen]
    if CPU in chosen.params.all_devices:
        why = _with_cpu(chosen, others, gpus)
    elif len(chosen.params.devices) == 1:
        why = _alone(chosen, others, gpus)
    else:
        why = _several(chosen, others, gpus)
    return f"{why[0].upper()}{why[1:]}."


def _alone(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """One GPU."""
    name, rate = names(chosen.params.devices), _rate(chosen)
    split = next((one for one in others if len(one.params.devices) > 1), None)
    if len(gpus) == 1:
        return f"{name}, the only GPU, holds the model: {rate} t/s"
    if split is None:
        return f"{name} alone: {rate} t/s; there is no split over several GPUs that fits"
    how = "split" if split.params.split_mode == "tensor" else _mode(split)
    told = f"{name} alone: {rate} t/s; {how} over {_set(split, gpus)} it would be {_rate(split)}"
    is_slower = split.speeds.decode_ts <= chosen.speeds.decode_ts
    if split.seconds <= chosen.seconds:
        n_more = len(split.params.devices) - 1
        more = "a second GPU" if n_more == 1 else f"{n_more} more GPUs"
        gain = "only prompts would gain by" if is_slower else "too little gain for"
        return f"{told}, {gain} {more}"
    if not is_slower:
        prompts = f"{_number(split.speeds.prefill_ts)} t/s instead of "
        prompts += _number(chosen.speeds.prefill_ts)
        return f"{told}, but prompts would be read at {prompts}"
    return f"{told}, {_why_slower(split, chosen)}"


def _several(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """More than one GPU: since one is slower, or since none holds the model."""
    single = next((one for one in others if len(one.params.devices) == 1), None)
    how = f"{_mode(chosen)} over {_set(chosen, gpus)}: {_rate(chosen)} t/s"
    if single is not None:
        alone = f"{how}; {names(single.params.devices)} alone gives {_rate(single)}"
        if not chosen.n_sum:
            return f"{alone}, since it is the slower one that has the room"
        why = f"each GPU reads only its part of the weights, although {_sums(chosen)}"
        return f"{alone}, because {why}"
    needed = f"no GPU holds the model alone; {how}"
    other = _other_way(chosen, others)
    if other is None:
        return needed
    compared = f"{needed}, {_difference(other, chosen, gpus)} {_rate(other)}"
    if len(other.params.devices) > len(chosen.params.devices) and other.seconds < chosen.seconds:
        return f"{compared}, too little gain for more GPUs"
    if other.params.split_mode == chosen.params.split_mode and other.link_s <= chosen.link_s:
        return compared
    return f"{compared}, {_why_slower(other, chosen)}"


def _difference(other: Alternative, chosen: Alternative, gpus: Sequence[str]) -> str:
    """How another split differs: "by layer", "over GPU 0 and GPU 1", or both."""
    mode = [] if other.params.split_mode == chosen.params.split_mode else [_mode(other)]
    is_same = len(other.params.devices) == len(chosen.params.devices)
    return " ".join(mode if is_same and mode else [*mode, f"over {_set(other, gpus)}"])


def _other_way(chosen: Alternative, others: Sequence[Alternative]) -> Alternative | None:
    """What to compare with: another mode on as many GPUs, or else on others, or what is next."""
    n, mode = len(chosen.params.devices), chosen.params.split_mode
    other_mode = [one for one in others if one.params.split_mode != mode]
    alike = [one for one in other_mode if len(one.params.devices) == n]
    return next(iter(alike or other_mode or others), None)


def _with_cpu(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """The CPU takes part."""
    rate, params = _rate(chosen), chosen.params
    if params.devices == (CPU,):
        if not gpus:
            return f"the CPU alone, as there is no GPU: {rate} t/s"
        if not others:
            return f"the CPU alone: {rate} t/s; the GPUs hold too little of the model"
        return (
            f"the CPU alone: {rate} t/s; the GPUs do not hold the model, and with a part of it "
            f"there it would be {_rate(others[0])}"
        )
    part = f"{params.n_cpu_blocks} blocks"
    if params.n_cpu_moe:
        part = f"the experts of {params.n_cpu_moe} blocks"
    few = names(gpus) if len(gpus) <= MOST_NAMED else f"the {len(gpus)} GPUs"
    room = "is" if len(gpus) == 1 else "are"
    told = f"{few} {room} too small, so the CPU has {part}: {rate} t/s"
    alone = next((one for one in others if one.params.devices == (CPU,)), None)
    return told if alone is None else f"{told}; the CPU alone gives {_rate(alone)}"


def _why_slower(slow: Alternative, fast: Alternative) -> str:
    """Why one split is slower than another."""
    if slow.params.split_mode == "groups" and fast.params.split_mode == "tensor":
        return "because only one group computes at a time"
    if len(slow.params.devices) > 1 and not slow.n_sum:
        return "because only one GPU computes at a time"
    lost = 1 / slow.speeds.decode_ts - 1 / fast.speeds.decode_ts
    if slow.n_sum and slow.link_s >= lost:
        return f"because {_sums(slow)}"
    limit = slow.limit.rstrip(".")
    if limit.startswith("Limited"):
        return f"{limit[0].lower()}{limit[1:].partition(':')[0]}"
    return f"because {limit}"


def _sums(one: Alternative) -> str:
    """What it costs to meet: "each token waits 64 times 13 µs for the other GPU"."""
    others = "the other GPU" if len(one.params.devices) == 2 else "the other GPUs"
    return f"each token waits {one.n_sum} times {1e6 * one.sum_s:.0f} µs for {others}"


def _mode(one: Alternative) -> str:
    """How a model is cut, in words."""
    if one.params.split_mode == "groups":
        sizes = " + ".join(map(str, one.params.group_sizes))
        return f"in groups of {sizes}"
    return "by layer" if one.params.split_mode == "layer" else "split by tensor"


def _set(one: Alternative, gpus: Sequence[str]) -> str:
    """Which GPUs: "both", "GPU 0 and GPU 2", "4 GPUs", "all 8 GPUs"."""
    n = len(one.params.devices)
    if n == len(gpus):
        return "both" if n == 2 else f"all {n} GPUs"
    return names(one.params.devices) if n <= MOST_NAMED else f"{n} GPUs"


def _rate(one: Alternative) -> str:
    return _number(one.speeds.decode_ts)


def _number(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 20 else f"{tokens_per_s:.1f}"
