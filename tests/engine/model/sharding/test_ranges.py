"""Rounding shares to units."""

from math import floor

from hypothesis import given
from hypothesis import strategies as st

from engine.model.sharding.shares import Apportioner, Ranges, largest_remainder

splits = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def shares_of(split: list[int]) -> list[float]:
    return [s / sum(split) for s in split]


@given(splits, st.lists(st.integers(0, 200), min_size=1, max_size=30), st.sampled_from([1, 8, 32]))
def test_every_cut_covers_the_whole_once(split: list[int], totals: list[int], unit: int) -> None:
    rounder = Apportioner(len(split))
    for total in totals:
        ranges = rounder.cut(shares_of(split), total, unit)
        covered = [i for start, stop in ranges.spans for i in range(start, stop)]
        assert covered == list(range(total))
        assert all(start % unit == 0 or start == total for start, _ in ranges.spans)


@given(splits, st.integers(1, 64), st.integers(1, 60))
def test_the_sum_over_blocks_follows_the_shares(split: list[int], total: int, n: int) -> None:
    """Carrying the rounding error keeps a model's total within about a unit of what was asked."""
    rounder = Apportioner(len(split))
    got = [0] * len(split)
    for _ in range(n):
        ranges = rounder.cut(shares_of(split), total)
        got = [g + ranges.size(r) for r, g in enumerate(got)]
    for share, count in zip(shares_of(split), got, strict=True):
        assert abs(share * total * n - count) < 2


def test_a_single_block_rounds_by_largest_remainder() -> None:
    assert Apportioner(3).cut([0.5, 0.3, 0.2], 4).spans == ((0, 2), (2, 3), (3, 4))


@given(splits, st.integers(0, 50))
def test_no_share_gets_nothing(split: list[int], total: int) -> None:
    rounder = Apportioner(len(split))
    for _ in range(5):
        ranges = rounder.cut(shares_of(split), total)
        assert all(ranges.size(r) == 0 for r, s in enumerate(split) if s == 0)


def test_two_blocks_make_up_for_each_other() -> None:
    """5:0:1 of two heads cannot be met in one block, but over six it is met exactly."""
    rounder = Apportioner(3)
    sizes = [rounder.cut([5 / 6, 0, 1 / 6], 2).size(2) for _ in range(6)]
    assert sum(sizes) == 2


def test_a_rank_that_sits_blocks_out_is_owed_as_much_as_before() -> None:
    """Each second block is whole on one rank, as an override has it."""
    rounder, got = Apportioner(3), [0, 0, 0]
    for _ in range(12):
        shared = rounder.cut([0.5, 0.25, 0.25], 2)
        got = [g + shared.size(r) for r, g in enumerate(got)]
        assert rounder.cut([1, 0, 0], 2).spans == ((0, 2), (2, 2), (2, 2))
    assert got == [12, 6, 6]


@given(splits, st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 40))
def test_the_sum_follows_the_shares_whatever_lies_between(
    split: list[int], between: list[int | None], total: int
) -> None:
    """Now and then a block is whole on one rank."""
    rounder, got = Apportioner(len(split)), [0] * len(split)
    for owner in between:
        if owner is not None and owner < len(split):
            rounder.cut([float(r == owner) for r in range(len(split))], total)
        ranges = rounder.cut(shares_of(split), total)
        got = [g + ranges.size(r) for r, g in enumerate(got)]
    for share, count in zip(shares_of(split), got, strict=True):
        assert abs(share * total * len(between) - count) < 2


def test_an_uneven_last_unit_is_not_counted_as_a_whole_one() -> None:
    """172 columns are five units of 32 and one of 12: the rank that gets the short one is owed."""
    rounder = Apportioner(2)
    got = sum(rounder.cut([0.75, 0.25], 172, 32).size(1) for _ in range(40))
    assert abs(got - 0.25 * 172 * 40) <= 32


def test_scaling_refines_the_same_cut() -> None:
    assert Ranges(((0, 1), (1, 3)), 3).scaled(4) == Ranges(((0, 4), (4, 12)), 12)
    assert Ranges(((0, 1), (1, 1), (1, 3)), 3).owners() == (0, 2)


@given(
    st.lists(st.floats(-3, 40), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    st.integers(0, 60),
)
def test_what_is_missing_goes_where_most_of_a_unit_was_cut_off(
    wanted: list[float], has_share: list[bool], total: int
) -> None:
    """One unit at a time, the first rank before others that are as far off."""
    shares = [1.0 if has else 0.0 for has in has_share[: len(wanted)]]
    if not any(shares):
        shares[0] = 1.0
    wanted = [w if s else 0.0 for w, s in zip(wanted, shares, strict=True)]
    expected = [max(0, floor(w)) for w in wanted]
    while missing := total - sum(expected):
        step = 1 if missing > 0 else -1
        able = [r for r, s in enumerate(shares) if s and expected[r] + step >= 0]
        expected[max(able, key=lambda r: (step * (wanted[r] - expected[r]), -r))] += step
    assert largest_remainder(wanted, shares, total) == expected


def test_a_block_without_a_part_changes_nothing_for_the_next() -> None:
    alone, between = Apportioner(2), Apportioner(2)
    for total in (5, 5, 5, 5):
        between.cut([0.7, 0.3], 0)
        assert between.cut([0.7, 0.3], total) == alone.cut([0.7, 0.3], total)
