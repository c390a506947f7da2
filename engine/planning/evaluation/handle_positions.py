"""Positions of the handle between two neighbouring ranks, and the actual shares there.

A model is cut in units, so ranks get shares close to the requested ones. A handle therefore snaps:
each position is a split that can be requested, with its actual share. Positions are evaluated
lazily, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.model.sharding.shares import Apportioner, normalise
from engine.model.sharding.split import COLUMN_UNIT

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.model.sharding.split import BlockDims
    from engine.planning.plan import Plan

MAX_STEPS = 400
"""Maximum number of positions per handle; finer steps are invisible on a screen."""

Split = tuple[float, ...]


class Position(NamedTuple):
    """A handle position: shares to request, and requested and actual share to the left of it."""

    split: Split
    asked: float
    effective: float


class Positions:
    """The positions of one handle, from all on its right neighbour to all on its left one."""

    def __init__(self, splits: Sequence[Split], handle: int, plan: Callable[[Split], Plan]) -> None:
        self._splits = splits
        self._handle = handle
        self._plan = plan
        self._known: dict[int, Position] = {}
        self._gap = 0.0
        left = slice(handle + 1)
        self._step = (sum(splits[-1][left]) - sum(splits[0][left])) / max(1, len(splits) - 1)

    def __len__(self) -> int:
        return len(self._splits)

    def __getitem__(self, index: int) -> Position:
        found = self._known.get(index)
        if found is None:
            split = self._splits[range(len(self))[index]]
            left = slice(self._handle + 1)
            effective = sum(device.effective for device in self._plan(split).devices[left])
            found = self._known[index] = Position(split, sum(split[left]), effective)
        return found

    def nearest(self, boundary: float) -> int:
        """Return the index of the position whose actual share is nearest to `boundary`, 0 to 1.

        The first one found within half a step is returned. Shares grow with positions, so few
        positions are evaluated, starting at the offset found by the previous call.
        """
        last = len(self) - 1
        low = high = self._asked_at(boundary - self._gap)
        if abs(self[low].effective - boundary) < self._step / 2:
            return low
        step = 1
        while low > 0 and self[low].effective > boundary:
            low, high, step = max(0, low - step), low, 2 * step
        while high < last and self[high].effective < boundary:
            low, high, step = high, min(last, high + step), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            if self[middle].effective < boundary:
                low = middle
            else:
                high = middle
        best = min((low, high), key=lambda i: abs(self[i].effective - boundary))
        self._gap = self[best].effective - self[best].asked
        return best

    def _asked_at(self, boundary: float) -> int:
        left = slice(self._handle + 1)
        first, last = sum(self._splits[0][left]), sum(self._splits[-1][left])
        if last <= first:
            return 0
        index = round((boundary - first) / (last - first) * (len(self) - 1))
        return min(max(index, 0), len(self) - 1)

    def after(self, index: int) -> int:
        """Return the next position to the right with a larger actual share, or else the last."""
        return self._beyond(index, 1)

    def before(self, index: int) -> int:
        """Return the next position to the left with a smaller actual share, or else the first."""
        return self._beyond(index, -1)

    def _beyond(self, index: int, step: int) -> int:
        start, end = self[index].effective, len(self) - 1 if step > 0 else 0
        while index != end:
            index += step
            if step * (self[index].effective - start) > 0:
                return index
        return end


def positions_of(
    params: LoadParams, handle: int, dims: Sequence[BlockDims], plan: Callable[[LoadParams], Plan]
) -> Positions:
    """Return the positions of the handle between ranks `handle` and `handle` + 1.

    Raises:
        SplitError: the current split is invalid.
    """
    shares = normalise(params.split, len(params.devices))
    splits = _by_block if params.split_mode == "layer" else _by_unit
    found = splits(shares, handle, dims[min(params.n_cpu_blocks, len(dims)) :])
    return Positions(found, handle, lambda split: plan(replace(params, split=split)))


def _by_block(shares: Split, handle: int, dims: Sequence[BlockDims]) -> list[Split]:
    # one split per number of blocks on the left, with block counts as shares
    cut = Apportioner(len(shares)).cut(shares, max(1, len(dims)))
    counts = [cut.size(rank) for rank in range(len(shares))]
    return _moved([n / sum(counts) for n in counts], handle, counts[handle] + counts[handle + 1])


def _by_unit(shares: Split, handle: int, dims: Sequence[BlockDims]) -> list[Split]:
    # about two splits per unit in the part with the most units
    units = (
        sum(block.n_head for block in dims),
        sum(block.n_state_head // block.state_unit for block in dims),
        *(
            sum(-(-getattr(block, columns) // COLUMN_UNIT) for block in dims)
            for columns in ("n_ff", "n_ff_exp", "n_ff_shexp")
        ),
    )
    both = shares[handle] + shares[handle + 1]
    return _moved(shares, handle, min(MAX_STEPS, round(2 * max(units) * both)))


def _moved(shares: Sequence[float], handle: int, n: int) -> list[Split]:
    left, right = shares[:handle], shares[handle + 2 :]
    both = shares[handle] + shares[handle + 1]
    n = max(n, 1) if both else 0
    parts = (both * step / n if n else 0.0 for step in range(n + 1))
    return [(*left, part, max(0.0, both - part), *right) for part in parts]
