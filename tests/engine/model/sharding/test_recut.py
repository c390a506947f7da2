"""Runs of units between ranks when a cut changes, and the order of moves."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.model.sharding.shares import Apportioner, Ranges
from engine.model.sharding.split import Move, Segments, _HeadCutter, as_one, next_move, runs

Shares = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def shares(weights: list[int]) -> list[float]:
    return [w / sum(weights) for w in weights]


def cut(weights: list[int], total: int) -> Ranges:
    return Apportioner(len(weights)).cut(shares(weights), total)


def spread(cuts: Segments, whole: list[np.ndarray]) -> list[np.ndarray]:
    """Return what each rank of a cut holds of some segments."""
    return [
        np.concatenate([part[slice(*c.spans[rank])] for c, part in zip(cuts, whole, strict=True)])
        for rank in range(len(cuts[0].spans))
    ]


def recut(old: Segments, new: Segments, held: list[np.ndarray]) -> list[np.ndarray]:
    found = []
    for rank in range(len(new[0].spans)):
        mine = np.full(sum(c.size(rank) for c in new), -1)
        for run in runs(old, new, rank, range(len(held))):
            mine[run.goal : run.goal + run.n] = held[run.source][run.start : run.start + run.n]
        found.append(mine)
    return found


@given(Shares, Shares, st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_every_rank_gets_its_units_of_every_segment(
    a: list[int], b: list[int], sizes: list[int]
) -> None:
    old, new = (tuple(cut(weights, size) for size in sizes) for weights in (a, b))
    starts = np.cumsum([0, *sizes])
    whole = [np.arange(x, y) for x, y in pairwise(starts)]
    for before, after in ((old, new), (old, as_one(old)), (as_one(old), new)):
        found = recut(before, after, spread(before, whole))
        assert all(map(np.array_equal, found, spread(after, whole)))


@given(Shares, Shares, st.sampled_from([1, 2, 3, 4]))
def test_heads_that_several_ranks_hold_are_taken_once(
    a: list[int], b: list[int], n_kv: int
) -> None:
    """With more ranks than key-value heads, as attention cuts them."""
    old, new = (
        (_HeadCutter(len(weights)).cut(shares(weights), 8 * n_kv, n_kv)[1],) for weights in (a, b)
    )
    whole = [np.arange(n_kv)]
    assert all(map(np.array_equal, recut(old, new, spread(old, whole)), spread(new, whole)))
    taken = [run.n for run in runs(old, as_one(old), 0, range(len(a)))]
    assert sum(taken) == n_kv


def test_the_source_that_is_asked_first_gives_what_it_has() -> None:
    old = (Ranges(((0, 2), (0, 2), (1, 3)), 3),)
    (run, rest) = runs(old, as_one(old), 0, [1, 2, 0])
    assert (run.source, run.start, run.goal, run.n) == (1, 0, 0, 2)
    assert (rest.source, rest.start, rest.goal, rest.n) == (2, 1, 2, 1)
    (run, rest) = runs(old, as_one(old), 0, [2, 0, 1])
    assert [(r.source, r.n) for r in (run, rest)] == [(0, 2), (2, 1)]


def peak(moves: list[Move], held: Counter[str], limits: dict[str, int]) -> dict[str, int]:
    """Return the most that each device holds while the moves are made, nothing else being freed."""
    held, most = Counter(held), Counter(held)
    while moves:
        move = moves.pop(next_move(moves, held, {}, limits))
        held.update(move.adds)
        most |= held
        held.subtract(move.drops)
    return dict(most)


def test_devices_that_swap_their_blocks_do_so_in_turn() -> None:
    """All blocks of one first, then all of the other, would take twice the memory."""
    there = [Move({"b": 10}, {"a": 10}) for _ in range(20)]
    back = [Move({"a": 10}, {"b": 10}) for _ in range(20)]
    limits = {"a": 200, "b": 200}
    assert max(peak(there + back, Counter(limits), limits).values()) <= 210


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=40))
def test_nobody_holds_much_more_than_before_or_after(ways: list[tuple[str, str]]) -> None:
    """Blocks of one size that go from one device to another, in any way."""
    before, after = (Counter(dict.fromkeys("abc", 0)) for _ in range(2))
    before.update(source for source, _ in ways)
    after.update(goal for _, goal in ways)
    limits = {device: max(before[device], after[device]) for device in "abc"}
    moves = [Move({goal: 1}, {source: 1}) for source, goal in ways]
    for device, most in peak(moves, before, limits).items():
        assert most <= limits[device] + 1
