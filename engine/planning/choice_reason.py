"""The sentences that tell the user why a split was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.hardware.devices.types import CPU
from engine.planning.search.results import names

if TYPE_CHECKING:
    from engine.planning.search.alternative import Alternative

MOST_NAMED = 3
"""Most GPUs that are named; more are counted."""


def reason_for_choice(
    chosen: Alternative | None, alternatives: Sequence[Alternative], gpus: Sequence[str]
) -> str:
    """Return why a split was chosen, in up to three short sentences.

    Args:
        chosen: the chosen split; None where nothing fits.
        alternatives: all predicted splits, the fastest first.
        gpus: ids of all GPUs of the machine.
    """
    if chosen is None:
        return "No device has room for the model with this context."
    others = [one for one in alternatives if one is not chosen]
    if CPU in chosen.params.all_devices:
        why = _with_cpu(chosen, others, gpus)
    elif len(chosen.params.devices) == 1:
        why = _alone(chosen, others, gpus)
    else:
        why = _several(chosen, others, gpus)
    return f"{_upper(why)}."


def _alone(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why one GPU was chosen."""
    name, rate = names(chosen.params.devices), _rate(chosen)
    split = next((one for one in others if len(one.params.devices) > 1), None)
    if len(gpus) == 1:
        return f"{name} is the only GPU, and holds the model"
    if split is None:
        return f"{name} alone: {rate} tok/s. No split over several GPUs fits"
    how = "Split" if split.params.split_mode == "tensor" else _upper(_mode(split))
    told = f"{name} alone: {rate} tok/s. {how} over {_set(split, gpus)}: {_rate(split)}"
    is_slower = split.speeds.decode_ts <= chosen.speeds.decode_ts
    if split.seconds <= chosen.seconds:
        n_more = len(split.params.devices) - 1
        more = "a second GPU" if n_more == 1 else f"{n_more} more GPUs"
        if is_slower:
            return f"{told}; only prompts would gain from {more}"
        return f"{told}, too little gain for {more}"
    if not is_slower:
        prompts = f"{_number(split.speeds.prefill_ts)} tok/s instead of "
        prompts += _number(chosen.speeds.prefill_ts)
        return f"{told}, but prompts are read at {prompts}"
    return f"{told}, {_why_slower(split, chosen)}"


def _several(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why several GPUs were chosen: one is slower, or none holds the model."""
    single = next((one for one in others if len(one.params.devices) == 1), None)
    how = f"{_mode(chosen)} over {_set(chosen, gpus)}: {_rate(chosen)} tok/s"
    if single is not None:
        alone = f"{how}, {names(single.params.devices)} alone: {_rate(single)}"
        if not chosen.n_sum:
            return f"{alone}, because only the slower GPU has room for the whole model"
        return (
            f"{alone}. Each GPU reads only its part of the weights, although {_all_reduces(chosen)}"
        )
    needed = f"no GPU holds the model alone. {_upper(how)}"
    other = _compared(chosen, others)
    if other is None:
        return needed
    compared = f"{needed}. {_upper(_difference(other, chosen, gpus))}: {_rate(other)}"
    if len(other.params.devices) > len(chosen.params.devices) and other.seconds < chosen.seconds:
        return f"{compared}, too little gain for more GPUs"
    if other.params.split_mode == chosen.params.split_mode and other.link_s <= chosen.link_s:
        return compared
    return f"{compared}, {_why_slower(other, chosen)}"


def _difference(other: Alternative, chosen: Alternative, gpus: Sequence[str]) -> str:
    """Return how another split differs: "by layer", "over GPU 0 and GPU 1", or both."""
    mode = [] if other.params.split_mode == chosen.params.split_mode else [_mode(other)]
    is_same = len(other.params.devices) == len(chosen.params.devices)
    return " ".join(mode if is_same and mode else [*mode, f"over {_set(other, gpus)}"])


def _compared(chosen: Alternative, others: Sequence[Alternative]) -> Alternative | None:
    """Return the split to compare with: another mode on as many GPUs, another mode, the next."""
    n, mode = len(chosen.params.devices), chosen.params.split_mode
    other_mode = [one for one in others if one.params.split_mode != mode]
    alike = [one for one in other_mode if len(one.params.devices) == n]
    return next(iter(alike or other_mode or others), None)


def _with_cpu(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why the CPU takes part."""
    rate, params = _rate(chosen), chosen.params
    if params.devices == (CPU,):
        if not gpus:
            return "the CPU alone, as there is no GPU"
        told = f"the CPU alone: {rate} tok/s"
        if not others:
            return f"{told}. {_upper(_all(gpus))} {_have(gpus)} too little memory to help"
        with_gpus = f"{_all(gpus)}, which {_have(gpus)} room for a part only"
        return f"{told}. With {with_gpus}: {_rate(others[0])}"
    part = f"{params.n_cpu_blocks} blocks"
    if params.n_cpu_moe:
        part = f"the experts of {params.n_cpu_moe} blocks"
    are = "is" if len(gpus) == 1 else "are"
    told = f"{_all(gpus)} {are} too small, so {part} are on the CPU: {rate} tok/s"
    alone = next((one for one in others if one.params.devices == (CPU,)), None)
    return told if alone is None else f"{told}. The CPU alone: {_rate(alone)}"


def _all(gpus: Sequence[str]) -> str:
    return names(gpus) if len(gpus) <= MOST_NAMED else f"the {len(gpus)} GPUs"


def _have(gpus: Sequence[str]) -> str:
    return "has" if len(gpus) == 1 else "have"


def _why_slower(slow: Alternative, fast: Alternative) -> str:
    """Return why one split is slower than another, as the end of a sentence."""
    if slow.params.split_mode == "groups" and fast.params.split_mode == "tensor":
        return "because only one group computes at a time"
    if len(slow.params.devices) > 1 and not slow.n_sum:
        return "because only one GPU computes at a time"
    lost = 1 / slow.speeds.decode_ts - 1 / fast.speeds.decode_ts
    if slow.n_sum and slow.link_s >= lost:
        return f"because {_all_reduces(slow)}"
    limit = slow.limit.rstrip(".")
    if limit.startswith("Limited"):
        return f"{limit[0].lower()}{limit[1:].partition(':')[0]}"
    if limit.startswith("The "):
        limit = f"the {limit[4:]}"
    return f"because {limit}"


def _all_reduces(one: Alternative) -> str:
    """Return what all-reduces cost: "each token waits 64 times 13 µs for the other GPU"."""
    others = "the other GPU" if len(one.params.devices) == 2 else "the other GPUs"
    return f"each token waits {one.n_sum} times {1e6 * one.sum_s:.0f} µs for {others}"


def _mode(one: Alternative) -> str:
    """Return how a model is split, within a sentence."""
    if one.params.split_mode == "groups":
        sizes = " + ".join(map(str, one.params.group_sizes))
        return f"in groups of {sizes}"
    return "by layer" if one.params.split_mode == "layer" else "split by tensor"


def _set(one: Alternative, gpus: Sequence[str]) -> str:
    """Return a split's GPUs: "both", "GPU 0 and GPU 2", "4 GPUs", "all 8 GPUs"."""
    n = len(one.params.devices)
    if n == len(gpus):
        return "both" if n == 2 else f"all {n} GPUs"
    return names(one.params.devices) if n <= MOST_NAMED else f"{n} GPUs"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _rate(one: Alternative) -> str:
    return _number(one.speeds.decode_ts)


def _number(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 20 else f"{tokens_per_s:.1f}"
