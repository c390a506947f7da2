"""The table of requested shares, which represents every kind of split.

For each block and part (attention, recurrent layer, FFN, experts, shared expert), and for the
embedding and the output head, the table holds the share of every rank. Tensor parallelism has the
same fractions everywhere, a layer split is one-hot per block, groups have their own fractions in
their blocks, and an override is one-hot for the parts it names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from engine.errors import SplitError
from engine.formats.gguf.tensors import split_name


@dataclass(frozen=True, slots=True)
class Ranges:
    """One half-open interval of units for each rank.

    Intervals are in rank order. They may be empty, but overlap only if units are replicated
    (key-value heads shared by ranks).
    """

    spans: tuple[tuple[int, int], ...]
    total: int

    def __hash__(self) -> int:
        return hash(self.spans)

    def size(self, rank: int) -> int:
        """Return a rank's number of units."""
        start, stop = self.spans[rank]
        return stop - start

    def owners(self) -> tuple[int, ...]:
        """Return the ranks with a non-empty interval."""
        return tuple(r for r, (start, stop) in enumerate(self.spans) if stop > start)

    def first_held(self, rank: int) -> slice:
        """Return the part of a rank's interval that no earlier rank holds, relative to the
        interval's start."""
        start, stop = self.spans[rank]
        taken = max((end for begin, end in self.spans[:rank] if end > begin), default=0)
        return slice(min(max(taken - start, 0), stop - start), stop - start)

    def shortened(self, total: int) -> Ranges:
        """Return a split of fewer units in the same proportions, with at least one per owner.

        `total` must be at least the number of owners.
        """
        return _shortened(self, total)

    def scaled(self, factor: int) -> Ranges:
        """Return the same split in units `factor` times finer."""
        return _scaled(self, factor)


@lru_cache(maxsize=1 << 14)
def _scaled(ranges: Ranges, factor: int) -> Ranges:
    spans = tuple((start * factor, stop * factor) for start, stop in ranges.spans)
    return Ranges(spans, ranges.total * factor)


@lru_cache(maxsize=1 << 14)
def _shortened(ranges: Ranges, total: int) -> Ranges:
    sizes = [float(stop - start) for start, stop in ranges.spans]
    wanted = [size * total / ranges.total for size in sizes]
    counts = [
        max(n, int(size > 0))
        for n, size in zip(largest_remainder(wanted, sizes, total), sizes, strict=True)
    ]
    counts[counts.index(max(counts))] -= sum(counts) - total
    return _from_counts(tuple(counts), total, 1)


@lru_cache(maxsize=1 << 14)
def _from_counts(counts: tuple[int, ...], total: int, unit: int) -> Ranges:
    """Return the split with `counts` units per rank; cached because most blocks have the same
    split."""
    stops = [min(stop * unit, total) for stop in accumulate(counts)]
    return Ranges(tuple(pairwise([0, *stops])), total)


def empty_ranges(n_ranks: int) -> Ranges:
    """Return the empty split of a part that a block does not have."""
    return _from_counts((0,) * n_ranks, 0, 1)


class Apportioner:
    """Largest-remainder apportionment that carries its rounding error from call to call.

    Splitting each of `n` blocks independently would round the same way every time and drift from
    the requested shares; carrying the error keeps the sum over all blocks within about one unit of
    those shares.
    """

    def __init__(self, n_ranks: int) -> None:
        self._carry = [0.0] * n_ranks

    def cut(self, shares: Sequence[float], total: int, unit: int = 1) -> Ranges:
        """Divide `total` by `shares` (which sum to 1) at multiples of `unit`.

        A rank with a share of 0 gets nothing and keeps its error; a total of 0 leaves all errors
        unchanged. The last unit may be short.
        """
        if not total:
            return empty_ranges(len(shares))
        wanted = [s * total + c if s else 0.0 for s, c in zip(shares, self._carry, strict=True)]
        units = [w / unit for w in wanted] if unit > 1 else wanted
        ranges = _from_counts(
            tuple(largest_remainder(units, shares, -(-total // unit))), total, unit
        )
        self._carry = [
            w - (b - a) if s else c
            for w, (a, b), s, c in zip(wanted, ranges.spans, shares, self._carry, strict=True)
        ]
        return ranges


def largest_remainder(wanted: Sequence[float], shares: Sequence[float], total: int) -> list[int]:
    """Round `wanted` to whole numbers that sum to `total`; ranks without a share stay at 0."""
    counts = [int(w) if w > 0 else 0 for w in wanted]
    missing = total - sum(counts)
    if missing:
        step = 1 if missing > 0 else -1
        gaps = [
            step * (w - c) if s else -inf for w, c, s in zip(wanted, counts, shares, strict=True)
        ]
        while missing:
            rank = gaps.index(max(gaps))
            if counts[rank] + step >= 0:
                counts[rank] += step
                missing -= step
                gaps[rank] = step * (wanted[rank] - counts[rank])
            else:
                gaps[rank] = -inf
    return counts


Shares = tuple[float, ...]  # share of each rank; the sum is 1

PARTS = (
    ("experts", re.compile(r"ffn_(gate|up|down|gate_up)_exps\.")),
    ("shared", re.compile(r"ffn_(gate|up|down)_shexp\.")),
    ("ffn", re.compile(r"ffn_(gate|up|down)\.")),
    ("recurrent", re.compile(r"(ssm|shortconv)[_.](?!.*norm)")),
    ("attention", re.compile(r"attn_(?!.*norm)")),
)
"""Part of a block to which a tensor belongs, by the tensor's name; other tensors are replicated."""


@dataclass(frozen=True, slots=True)
class BlockShares:
    """The requested shares for each part of one block."""

    attention: Shares
    recurrent: Shares
    ffn: Shares
    experts: Shares
    shared: Shares

    @classmethod
    def alike(cls, shares: Shares) -> BlockShares:
        """Return a block with the same shares in every part."""
        return cls(shares, shares, shares, shares, shares)


@dataclass(frozen=True, slots=True)
class ShareTable:
    """The requested shares for a model: its blocks, its embedding and its output head."""

    blocks: tuple[BlockShares, ...]
    embedding: Shares
    output: Shares

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.output)


def normalise(split: Sequence[float] | None, n_ranks: int) -> Shares:
    """Turn relative weights such as (3, 1) into shares that sum to 1; None means even.

    Raises:
        SplitError: the number of weights is wrong, one is negative or not finite, or all are zero.
    """
    if split is None:
        return (1.0 / n_ranks,) * n_ranks
    if len(split) != n_ranks:
        raise SplitError(
            "The split has {n} numbers, but there are {other} devices.",
            "Specify one number per device, for example --devices cpu,cpu --split 3,1.",
            n=len(split), other=n_ranks,
        )  # fmt: skip
    if any(not 0 <= s < float("inf") for s in split) or max(split) <= 0:
        raise SplitError(
            "Split numbers must be at least 0, with at least one above 0.",
            "For example --split 3,1.",
        )
    largest = max(split)  # first, so that the sum of huge numbers stays finite
    total = sum(s / largest for s in split)
    return tuple(s / largest / total for s in split)


def share_table(
    mode: str, shares: Shares, n_layer: int, *, tied: bool, groups: Sequence[int] = ()
) -> ShareTable:
    """Return the table for a split mode.

    Args:
        mode: "tensor" (the same fractions everywhere), "layer" (whole blocks, in rank order) or
            "groups" (whole blocks to groups of ranks, with fractions inside each).
        shares: requested share of each rank.
        tied: whether the output head is the embedding, so that both have the same split.
        groups: sizes of the groups, in rank order; remaining ranks have no share.
    """
    if mode == "tensor":
        return ShareTable((BlockShares.alike(shares),) * n_layer, shares, shares)
    rows = _by_block(shares, groups if mode == "groups" else (1,) * len(shares), max(1, n_layer))
    first, last = rows[0].ffn, rows[-1].ffn
    return ShareTable(tuple(rows[:n_layer]), last if tied else first, last)


def _by_block(shares: Shares, groups: Sequence[int], n_layer: int) -> list[BlockShares]:
    """Give whole blocks to consecutive groups of ranks, in proportion to each group's shares."""
    stops = list(accumulate(groups))
    totals = [sum(shares[stop - size : stop]) for stop, size in zip(stops, groups, strict=True)]
    cut = Apportioner(len(groups)).cut(totals, n_layer)
    rows = []
    for group, (stop, size, total) in enumerate(zip(stops, groups, totals, strict=True)):
        if cut.size(group):
            inside = range(stop - size, stop)
            row = tuple(s / total if r in inside else 0.0 for r, s in enumerate(shares))
            rows += [BlockShares.alike(row)] * cut.size(group)
    return rows


def one_hot(rank: int, n_ranks: int) -> Shares:
    """Return the shares that give everything to one rank."""
    return tuple(1.0 if r == rank else 0.0 for r in range(n_ranks))


def apply_overrides(
    table: ShareTable,
    overrides: Iterable[tuple[str, str]],
    devices: Sequence[str],
    tensors: Collection[str],
    recurrent: Sequence[bool] = (),
) -> ShareTable:
    """Put every part with a tensor that matches a pattern on one device.

    Args:
        overrides: pairs of a regular expression for tensor names and a device, or "#" and a rank;
            later pairs win.
        devices: device of each rank; the first rank on the named device takes the part.
        tensors: names of the tensors in the file.
        recurrent: whether each block has a recurrent layer instead of attention; its `attn_…`
            tensors then belong to that layer.

    Raises:
        SplitError: a pattern is not a regular expression or matches no part, or a device or rank is
            not in use.
    """
    movable = movable_tensors(tuple(tensors), tuple(recurrent))
    for pattern, target in overrides:
        hot = one_hot(_rank_of(pattern, target, devices), len(devices))
        moved = _moved(table, movable.matching(pattern), hot)
        if moved is table:
            raise SplitError(
                "The override '{pattern}' matches no tensor that can be moved.",
                "`tandem inspect MODEL --tensors` lists the names.",
                pattern=pattern,
            )
        table = moved
    return table


def _rank_of(pattern: str, target: str, devices: Sequence[str]) -> int:
    if not target.startswith("#"):
        if target in devices:
            return list(devices).index(target)
        raise SplitError(
            "The override '{override}' names a device that is not in use.",
            "Use one of: {devices}.",
            override=f"{pattern}={target}", devices=", ".join(devices),
        )  # fmt: skip
    number = target[1:]
    if number.isascii() and number.isdigit() and int(number) < len(devices):
        return int(number)
    raise SplitError(
        "The override '{override}' names a rank that does not exist.",
        "Ranks are numbered in the order of the devices, #0 to #{last}.",
        override=f"{pattern}={target}", last=len(devices) - 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatchedParts:
    """The parts of a model that a pattern matches.

    Attributes:
        blocks: matched parts by block, for example (3, {"ffn"}).
        ends: "embedding", "output", both or none.
    """

    blocks: tuple[tuple[int, frozenset[str]], ...]
    ends: frozenset[str]


class MovableTensors:
    """The movable tensors of a file: names, blocks (or `END`) and parts, with a cache of
    patterns."""

    def __init__(self, places: Iterable[tuple[str, tuple[int, str]]]) -> None:
        self._places = tuple(places)
        self._matches: dict[str, MatchedParts] = {}

    def matching(self, pattern: str) -> MatchedParts:
        """Return the parts that contain a matching tensor.

        Raises:
            SplitError: the pattern is not a regular expression.
        """
        if pattern not in self._matches:
            if len(self._matches) >= MAX_PATTERNS:
                self._matches.clear()
            self._matches[pattern] = self._search(_compile(pattern))
        return self._matches[pattern]

    def _search(self, pattern: re.Pattern[str]) -> MatchedParts:
        blocks: dict[int, set[str]] = defaultdict(set)
        for name, (layer, part) in self._places:
            if pattern.search(name):
                blocks[layer].add(part)
        ends = frozenset(blocks.pop(END, ()))
        inside = sorted(blocks.items())
        return MatchedParts(tuple((layer, frozenset(parts)) for layer, parts in inside), ends)


@lru_cache(maxsize=8)
def movable_tensors(names: tuple[str, ...], recurrent: tuple[bool, ...]) -> MovableTensors:
    """Return the movable tensors of a file; for the arguments see `apply_overrides`."""
    places = ((name, part_of(name, recurrent)) for name in names)
    return MovableTensors((name, place) for name, place in places if place is not None)


def _moved(table: ShareTable, parts: MatchedParts, hot: Shares) -> ShareTable:
    """Return `table` with these parts one-hot; `table` itself if nothing changes."""
    blocks = list(table.blocks)
    inside = [(layer, moved) for layer, moved in parts.blocks if layer < len(blocks)]
    if not inside and not parts.ends:
        return table
    made: dict[tuple[int, frozenset[str]], BlockShares] = {}  # equal rows remain the same object
    for layer, moved in inside:
        key = id(blocks[layer]), moved
        if key not in made:
            made[key] = replace(table.blocks[layer], **dict.fromkeys(moved, hot))
        blocks[layer] = made[key]
    return replace(table, blocks=tuple(blocks), **dict.fromkeys(parts.ends, hot))


END = -1  # block index of the embedding and the output head
MAX_PATTERNS = 4096  # maximum number of cached patterns per file

_ENDS = {"token_embd.weight": "embedding", "output.weight": "output"}


def part_of(name: str, recurrent: Sequence[bool]) -> tuple[int, str] | None:
    """Return a tensor's block (or `END`) and its part of that block; None if it cannot be moved."""
    if name in _ENDS:
        return END, _ENDS[name]
    block = split_name(name)
    if block is None:
        return None
    layer, stem = block
    part = next((part for part, pattern in PARTS if pattern.match(stem)), None)
    if part == "attention" and layer < len(recurrent) and recurrent[layer]:
        part = "recurrent"
    return None if part is None else (layer, part)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SplitError(
            "The override '{pattern}' is not a regular expression: {problem}.",
            "For example 'ffn_.*_exps=cpu'.",
            pattern=pattern, problem=str(error),
        ) from None  # fmt: skip
