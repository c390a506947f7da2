"""The split as a value: shares always sum to 1, and a change touches only what it should."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.split_settings import (
    MAX_CPU_RANKS,
    MODES,
    SplitSettings,
    default_settings,
    from_dict,
    to_dict,
)
from engine import DeviceInfo, EngineError

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "Test CPU", 32 * GIB, 20 * GIB, n_cores=8)
GPUS = [
    DeviceInfo(f"cuda:{i}", "cuda", f"GPU {size}", size * GIB, size * GIB, uuid=f"GPU-{i}")
    for i, size in enumerate((24, 24, 12))
]
RIG = [*GPUS, CPU]

share_values = st.floats(0, 1)
changes = st.one_of(
    st.tuples(st.just("with_share"), st.integers(0, 5), share_values),
    st.tuples(st.just("with_boundary"), st.integers(0, 5), share_values),
    st.tuples(st.just("with_rank_on"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("with_cpu_ranks"), st.integers(0, 10)),
    st.tuples(st.just("with_mode"), st.sampled_from(MODES)),
)


def assert_sound(split: SplitSettings) -> None:
    on = [rank.share for rank in split.ranks if rank.is_on]
    assert math.isclose(math.fsum(on), 1.0, abs_tol=1e-9)
    assert math.isclose(math.fsum(split.shares), 1.0, abs_tol=1e-9)
    assert all(rank.share == 0.0 for rank in split.ranks if not rank.is_on)
    assert all(0.0 <= rank.share <= 1.0 for rank in split.ranks)
    assert 0 <= split.single < len(split.ranks)
    assert split.active


def tensor(*shares: float) -> SplitSettings:
    """The rig with these shares; a missing one is off."""
    split = default_settings(RIG).with_mode("tensor")
    for index in range(len(shares), len(RIG)):
        split = split.with_rank_on(index, False)
    for index in range(len(shares)):
        split = split.with_rank_on(index, True)
    return split.with_weights([*shares, *[0.0] * (len(RIG) - len(shares))])


@settings(deadline=None)
@given(st.sampled_from([RIG, [CPU], GPUS[:2]]), st.lists(changes, max_size=12))
def test_shares_sum_to_one_after_any_changes(
    devices: list[DeviceInfo], steps: list[tuple[Any, ...]]
) -> None:
    """Ranks that are off hold nothing, and at least one is on, whatever is done."""
    split = default_settings(devices)
    assert_sound(split)
    for name, *args in steps:
        if name == "with_rank_on" and args[0] >= len(split.ranks):
            continue
        split = getattr(split, name)(*args)
        assert_sound(split)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=4), st.integers(0, 2), share_values)
def test_moving_one_share_keeps_the_proportions_of_the_others(
    weights: list[float], index: int, share: float
) -> None:
    """The others shrink or grow by one common factor, so their order stays too."""
    before = tensor(*weights)
    after = before.with_share(index, share)
    assert math.isclose(after.shares[index], share, abs_tol=1e-9)
    others = [i for i in before.active if i != index]
    factor = (1 - share) / (1 - before.shares[index])
    for i in others:
        assert math.isclose(after.shares[i], before.shares[i] * factor, abs_tol=1e-9)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=4), st.integers(0, 2), share_values)
def test_moving_a_boundary_touches_its_two_neighbours_only(
    weights: list[float], handle: int, position: float
) -> None:
    """It stops at the next boundaries on both sides."""
    before = tensor(*weights)
    after = before.with_boundary(handle, position)
    for i in before.active:
        if i not in before.active[handle : handle + 2]:
            assert after.shares[i] == before.shares[i]
    if handle < len(before.active) - 1:
        low = before.boundary(handle - 1) if handle else 0.0
        high = before.boundary(handle + 1)
        expected = min(high, max(low, position))
        assert math.isclose(after.boundary(handle), expected, abs_tol=1e-9)


def test_others_that_had_nothing_share_evenly_what_one_gives_up() -> None:
    """From 1, 0, 0 there is no proportion to keep."""
    assert tensor(1, 0, 0).with_share(0, 0.5).shares == pytest.approx((0.5, 0.25, 0.25, 0))


def test_a_rank_switched_off_leaves_its_share_to_the_others() -> None:
    """In proportion, and it is not named to the engine any more."""
    split = tensor(2, 1, 1).with_rank_on(1, False)
    assert split.shares == pytest.approx((2 / 3, 0, 1 / 3, 0))
    assert split.load_params("m.gguf").devices == ("cuda:0", "cuda:2")


def test_the_last_rank_cannot_be_switched_off() -> None:
    """A model has to live somewhere."""
    split = tensor(1)
    assert split.with_rank_on(0, False) is split


def test_gpus_are_the_default_in_proportion_to_their_memory() -> None:
    """The CPU joins only on request; an unusable GPU is not offered."""
    assert default_settings(RIG).shares == pytest.approx((0.4, 0.4, 0.2, 0))
    broken = DeviceInfo(
        "cuda:3", "cuda", "Old", GIB, GIB, uuid="GPU-9", usable=False, reason="Too old."
    )
    assert default_settings([broken, CPU]).load_params("m").devices == ("cpu",)


def test_a_machine_without_gpu_starts_with_one_cpu_rank_and_takes_more() -> None:
    """Asking for more leaves "one device"; going back to one keeps the sum."""
    split = default_settings([CPU])
    assert split.mode == "single"
    assert split.load_params("m").split is None
    three = split.with_cpu_ranks(3)
    params = three.load_params("m")
    assert (three.mode, params.devices) == ("tensor", ("cpu",) * 3)
    assert params.split == pytest.approx((1 / 3,) * 3)
    assert three.with_cpu_ranks(99).n_cpu_ranks == MAX_CPU_RANKS
    assert three.with_cpu_ranks(1).shares == (1.0,)


def test_one_device_takes_all_and_the_split_comes_back() -> None:
    """Looking at "one device" does not lose the shares set before."""
    split = tensor(3, 1).with_mode("single").with_rank_on(1, True)
    assert split.shares == (0, 1, 0, 0)
    assert split.load_params("m").devices == ("cuda:1",)
    assert split.with_mode("layer").shares == pytest.approx((0.75, 0.25, 0, 0))
    assert split.with_mode("layer").load_params("m").split_mode == "layer"


def test_no_device_at_all_is_a_sentence() -> None:
    """The engine's own error, not an index error."""
    with pytest.raises(EngineError, match="No device"):
        SplitSettings().load_params("m")


@settings(deadline=None)
@given(st.lists(changes, max_size=8))
def test_json_restores_the_same_split(steps: list[tuple[Any, ...]]) -> None:
    """To a rounding error, after a real trip through text."""
    split = default_settings(RIG)
    for name, *args in steps:
        split = getattr(split, name)(*args) if name != "with_cpu_ranks" else split
    again = from_dict(json.loads(json.dumps(to_dict(split))), RIG)
    assert again.mode == split.mode
    assert again.active == split.active
    assert again.shares == pytest.approx(split.shares)


def test_gpus_are_recognised_by_uuid_when_their_numbers_change() -> None:
    """A card that moved to another slot keeps its share."""
    saved = to_dict(tensor(3, 1, 0).with_rank_on(2, False))
    moved = [
        DeviceInfo("cuda:0", "cuda", "GPU", 24 * GIB, 24 * GIB, uuid="GPU-1"),
        DeviceInfo("cuda:1", "cuda", "GPU", 24 * GIB, 24 * GIB, uuid="GPU-0"),
        CPU,
    ]
    assert from_dict(saved, moved).shares == pytest.approx((0.25, 0.75, 0))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
damaged = st.fixed_dictionaries(
    {},
    optional={
        "mode": json_values | st.sampled_from(MODES),
        "single": json_values,
        "n_ctx": json_values,
        "kv_type": json_values,
        "cpu_threads": json_values,
        "ranks": json_values
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "device": st.just("cpu") | json_values,
                    "on": json_values,
                    "share": json_values,
                },
            )
        ),
    },
)


@settings(deadline=None)
@example({"ranks": [{"device": "cpu", "on": True, "share": 10**400}]}, [CPU])
@given(damaged, st.sampled_from([RIG, [CPU]]))
def test_a_damaged_file_restores_to_something_sound(
    data: dict[str, Any], devices: list[DeviceInfo]
) -> None:
    """Any JSON there may be gives settings that can be loaded."""
    split = from_dict(data, devices)
    assert_sound(split)
    split.load_params("m.gguf")
