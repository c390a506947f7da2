"""The split as a value: shares always sum to 1, and a change touches only what it should."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.devices.split.saving import from_dict, to_dict
from app.devices.split.settings import (
    MAX_CPU_RANKS,
    MODES,
    Mode,
    SplitSettings,
    default_settings,
    is_same_load,
    resplit_params,
    settings_for,
)
from engine import DeviceInfo, EngineError, LoadParams

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
    st.tuples(st.just("with_chosen_mode"), st.sampled_from(MODES)),
    st.tuples(st.just("with_locked"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("with_joined"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("with_rank_moved"), st.integers(0, 3), st.integers(-4, 4)),
    st.tuples(st.just("with_reserve"), st.sampled_from(["cpu", "cuda:1"]), st.integers(0, 9)),
)
BY_RANK = ("with_rank_on", "with_locked", "with_joined", "with_rank_moved")


def assert_sound(split: SplitSettings) -> None:
    on = [rank.share for rank in split.ranks if rank.is_on]
    assert math.isclose(math.fsum(on), 1.0, abs_tol=1e-9)
    assert math.isclose(math.fsum(split.shares), 1.0, abs_tol=1e-9)
    assert all(rank.share == 0.0 for rank in split.ranks if not rank.is_on)
    assert all(0.0 <= rank.share <= 1.0 for rank in split.ranks)
    assert 0 <= split.single < len(split.ranks)
    assert not any(rank.is_locked and not rank.is_on for rank in split.ranks)
    assert sum(split.groups) == len(split.active)
    assert split.active


def tensor(*shares: float) -> SplitSettings:
    """Return settings of the rig with these shares; ranks without one are off."""
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
        if name in BY_RANK and args[0] >= len(split.ranks):
            continue
        before, split = split, getattr(split, name)(*args)
        assert_sound(split)
        if name in ("with_share", "with_boundary"):
            for old, new in zip(before.ranks, split.ranks, strict=True):
                assert not old.is_locked or new.share == old.share


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
    """The others grow in proportion; the engine does not get the rank any more."""
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


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
    ("devices", "on", "used"),
    [
        (RIG, (1,), ("cuda:0", "cuda:1", "cuda:2")),
        (RIG, (0, 2), ("cuda:0", "cuda:2")),
        ([GPUS[0], CPU], (0,), ("cuda:0", "cpu")),
        ([CPU], (0,), ("cpu", "cpu")),
    ],
    ids=["one of three", "two of three", "one beside the CPU", "CPU alone"],
)
def test_a_split_is_between_several_ranks(
    devices: list[DeviceInfo], on: tuple[int, ...], used: tuple[str, ...], mode: Mode
) -> None:
    """Where a person chose several, it is between these."""
    split = default_settings(devices)
    for index in on:
        split = split.with_mode("tensor").with_rank_on(index, True)
    for index in range(len(devices)):
        if index not in on:
            split = split.with_rank_on(index, False)
    chosen = split.with_mode("single").with_chosen_mode(mode)
    assert chosen.mode == mode
    assert chosen.load_params("m").devices == used
    assert_sound(chosen)
    assert split.with_chosen_mode("single").mode == "single"


def test_no_device_at_all_is_a_sentence() -> None:
    """The engine's own error is raised, not an index error."""
    with pytest.raises(EngineError, match="No device"):
        SplitSettings().load_params("m")


@settings(deadline=None)
@given(st.lists(changes, max_size=8))
def test_json_restores_the_same_split(steps: list[tuple[Any, ...]]) -> None:
    """They are equal up to rounding, after a round trip through text."""
    split = default_settings(RIG)
    for name, *args in steps:
        split = getattr(split, name)(*args) if name != "with_cpu_ranks" else split
    again = from_dict(json.loads(json.dumps(to_dict(split))), RIG)
    assert again.mode == split.mode
    assert again.active == split.active
    assert again.shares == pytest.approx(split.shares)
    assert [r.device for r in again.ranks] == [r.device for r in split.ranks]
    assert [(r.is_locked, r.joins) for r in again.ranks] == [
        (r.is_locked, r.joins) for r in split.ranks
    ]
    assert again.reserve == split.reserve


def test_gpus_are_recognised_by_uuid_when_their_numbers_change() -> None:
    """A card that moved to another slot keeps its share and its place in the order."""
    saved = to_dict(tensor(3, 1, 0).with_rank_on(2, False))
    moved = [
        DeviceInfo("cuda:0", "cuda", "GPU", 24 * GIB, 24 * GIB, uuid="GPU-1"),
        DeviceInfo("cuda:1", "cuda", "GPU", 24 * GIB, 24 * GIB, uuid="GPU-0"),
        CPU,
    ]
    again = from_dict(saved, moved)
    assert [rank.device for rank in again.ranks] == ["cuda:1", "cuda:0", "cpu"]
    assert again.shares == pytest.approx((0.75, 0.25, 0))
    assert [rank.is_on for rank in again.ranks] == [True, True, False]


def test_what_an_older_version_saved_is_restored() -> None:
    """It has no locks, groups, reserves, or blocks on the CPU."""
    old = {
        "mode": "layer",
        "single": 1,
        "ranks": [
            {"device": "GPU-0", "on": True, "share": 0.25},
            {"device": "GPU-1", "on": True, "share": 0.75},
            {"device": "GPU-2", "on": False, "share": 0.0},
            {"device": "cpu", "on": False, "share": 0.0},
        ],
        "n_ctx": 4096,
        "kv_type": "q8_0",
        "cpu_threads": None,
    }
    split = from_dict(old, RIG)
    assert split.shares == pytest.approx((0.25, 0.75, 0, 0))
    assert (split.mode, split.n_ctx, split.kv_type, split.reserve) == ("layer", 4096, "q8_0", ())
    assert [rank.joins for rank in split.ranks] == [False, True, False, False]


def test_a_saved_place_follows_its_card() -> None:
    """Overrides and reserves are saved with the keys of devices."""
    split = replace(
        tensor(1, 1),
        reserve=(("cuda:1", GIB),),
        overrides=(("ffn_", "cuda:1"), ("attn_", "#0"), ("x", "cpu")),
        n_cpu_moe=3,
        n_cpu_blocks=2,
        kv_on_host=True,
        fast_prompts=True,
        p2p="off",
    )
    saved = json.loads(json.dumps(to_dict(split)))
    assert from_dict(saved, RIG).load_params("m") == split.load_params("m")
    only = replace(GPUS[1], id="cuda:0")
    moved = from_dict(saved, [only]).load_params("m")
    assert moved.reserve == (("cuda:0", GIB),)
    assert moved.overrides == (("ffn_", "cuda:0"), ("attn_", "#0"))


def test_a_rank_that_is_put_elsewhere_leaves_groups_where_they_were() -> None:
    """Groups are places in the order, not devices."""
    split = tensor(3, 2, 1).with_joined(1, True).with_joined(2, False).with_mode("groups")
    moved = split.with_rank_moved(2, -2)
    assert moved.load_params("m").devices == ("cuda:2", "cuda:0", "cuda:1")
    assert moved.load_params("m").groups == split.load_params("m").groups == (2, 1)
    assert moved.load_params("m").split == pytest.approx((1 / 6, 1 / 2, 1 / 3))


@pytest.mark.parametrize(
    "params",
    [
        LoadParams("m", ("cuda:1",)),
        LoadParams("m", ("cuda:2", "cuda:0"), (1, 3), "layer", n_ctx=512, kv_type="q8_0"),
        LoadParams("m", ("cuda:0", "cuda:1", "cpu"), (2, 1, 1), "groups", groups=(2, 1)),
        LoadParams("m", ("cpu", "cpu"), (1, 1), reserve=(("cpu", 5),), cpu_threads=3),
        LoadParams("m", ("cpu",), fast_prompts=True),
        LoadParams("m", ("cpu",), parallel=8, checkpoint_bytes=1 << 20),
        LoadParams("m", ("cuda:0",), n_cpu_moe=4, n_cpu_blocks=1, kv_on_host=True),
        LoadParams("m", ("cuda:0", "cuda:1"), (1, 1), overrides=(("ffn_", "cpu"),)),
        LoadParams("m", ("cuda:0", "cuda:1"), (1, 1), p2p="on"),
    ],
)
def test_settings_can_be_made_that_load_what_is_wanted(params: LoadParams) -> None:
    """A remedy or a plan can be used whatever is chosen now."""
    for now in (default_settings(RIG), tensor(0, 0, 1).with_locked(2, True).with_cpu_ranks(3)):
        made = settings_for(now, params)
        assert_sound(made)
        assert is_same_load(made.load_params("m"), params, 0)


def test_devices_that_are_not_here_are_left_out_of_what_is_wanted() -> None:
    """Devices that are here share evenly; if none is, nothing changes."""
    now = default_settings([GPUS[0], GPUS[1], CPU])
    made = settings_for(now, LoadParams("m", ("cuda:0", "cuda:1", "cuda:7"), (1, 2, 3)))
    assert made.load_params("m").split == pytest.approx((0.5, 0.5))
    assert settings_for(now, LoadParams("m", ("cuda:7",))) == now


def test_only_a_split_can_be_given_to_a_loaded_model() -> None:
    loaded = LoadParams("m", ("cuda:0",), n_ctx=None)
    wanted = LoadParams("m", ("cuda:0", "cpu"), (1, 1), "layer", n_ctx=2048, n_cpu_moe=2)
    found = resplit_params(wanted, loaded, 4096)
    assert found == replace(wanted, n_ctx=None)
    for other in (replace(wanted, n_ctx=4096), replace(wanted, kv_type="f32")):
        assert resplit_params(other, loaded, 4096) is None
    assert resplit_params(replace(wanted, path="n"), loaded, 4096) is None


def test_how_gpus_reach_each_other_matters_where_there_are_several() -> None:
    one, two = LoadParams("m", ("cuda:0", "cpu")), LoadParams("m", ("cuda:0", "cuda:1"))
    assert is_same_load(one, replace(one, p2p="off"), 0)
    assert not is_same_load(two, replace(two, p2p="off"), 0)
    assert resplit_params(replace(two, p2p="off"), two, 0) == replace(two, p2p="off")


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
        "reserve": json_values | st.dictionaries(st.just("cpu"), json_values),
        "n_cpu_blocks": json_values,
        "n_cpu_moe": json_values,
        "kv_on_host": json_values,
        "p2p": json_values,
        "overrides": json_values | st.lists(st.lists(json_values, max_size=2)),
        "ranks": json_values
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "device": st.just("cpu") | json_values,
                    "on": json_values,
                    "share": json_values,
                    "locked": json_values,
                    "joins": json_values,
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
    """Any JSON gives settings that can be loaded."""
    split = from_dict(data, devices)
    assert_sound(split)
    split.load_params("m.gguf")
