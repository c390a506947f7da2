"""The splits of one model that a measured search may try on one machine. Imports no torch.

These are sets of devices, modes and positions that fit into free memory, with predicted speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineError, Sentence
from engine.hardware.devices.catalog import require_devices
from engine.load_params import SPLIT_MODES, LoadParams
from engine.planning.search.results import Goal, Region, Speeds

if TYPE_CHECKING:
    from engine.hardware.devices.types import DeviceInfo
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.evaluation.handle_positions import Positions
    from engine.planning.planner import Planner
    from engine.planning.speed.forecast import Forecaster

MAX_IN_ALL_SETS = 5
"""Maximum number of devices for which all sets are tried; with more, only the fastest and the
largest set of each size."""

MAX_IN_ALL_GROUPS = 4
"""Maximum number of ranks to group in all ways; with more, only equally or in the default way."""

MAX_OPTIMISED = 12
"""Maximum number of families whose shares are optimised by prediction before any measurement."""

MAX_BALANCED = 4
"""Maximum number of rebalancing steps before the first measurement."""

N_REGION = 40
"""Number of positions that are checked for memory, for the chart."""

NOT_FITTING = Sentence("It does not fit into free memory.")

GOLDEN = (5**0.5 - 1) / 2


def minimise(cost: Callable[[int], float], n: int, start: int, step: int, least: int) -> int:
    """Return the position from 0 to n - 1 with the lowest cost found.

    From `start`, the search goes downhill in growing steps until it has a bracket, which it divides
    until its parts are at most `least` long. Positions are evaluated repeatedly, so cache costs.

    Args:
        cost: returns the cost of a position; infinite if the position is impossible.
        least: length of the bracket's parts at which the search stops.
    """
    low, best, high = _bracket(cost, n, start, step)
    while True:
        is_right = high - best >= best - low
        part = high - best if is_right else best - low
        if part <= least or part < 2:
            return best
        move = max(1, round((1 - GOLDEN) * part))
        probe = best + move if is_right else best - move
        if cost(probe) < cost(best):
            low, best, high = (best, probe, high) if is_right else (low, probe, best)
        elif is_right:
            high = probe
        else:
            low = probe


def _bracket(cost: Callable[[int], float], n: int, start: int, step: int) -> tuple[int, int, int]:
    """Return three ordered positions, the best in the middle or at an end of the range."""
    low, best, high = max(0, start - step), start, min(n - 1, start + step)
    if min(cost(low), cost(high)) >= cost(best):
        return low, best, high
    sign = -1 if cost(low) < cost(high) else 1
    before, best = best, low if sign < 0 else high
    for ahead in _ahead(best, sign * step, n):
        if cost(ahead) >= cost(best):
            return (ahead, best, before) if sign < 0 else (before, best, ahead)
        before, best = best, ahead
    return (best, best, before) if sign < 0 else (before, best, best)


def _ahead(position: int, step: int, n: int) -> Iterator[int]:
    # in growing steps, up to the end
    end = n - 1 if step > 0 else 0
    size = float(step)
    while position != end:
        size /= GOLDEN
        position = min(max(position + round(size), 0), n - 1)
        yield position


def ranges(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first and last index of each run of true flags."""
    edges = [at for at, (a, b) in enumerate(pairwise([False, *flags, False])) if a != b]
    return [(first, stop - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True)]


Split = tuple[float, ...]


class Candidate(NamedTuple):
    """A split that may be tried; candidates with the same cut have the same `key`."""

    params: LoadParams
    key: Hashable
    shares: tuple[float, ...]
    predicted: Speeds | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Splits over the same devices in the same mode that differ in their shares.

    Attributes:
        params: parameters common to all of them, without shares.
        start: shares predicted to be the best.
        can_balance: whether moving work away from the busiest ranks may help.
    """

    params: LoadParams
    start: Split
    predicted_s: float
    can_balance: bool = True

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.params.devices)


def balanced(split: Split, busy_s: Sequence[float]) -> Split | None:
    """Return the split at which all ranks would be busy for the same time; None if unknown.

    This assumes that a rank's time is proportional to its share.

    Args:
        busy_s: seconds for which each rank is busy with `split`; 0 if not measured.
    """
    if len(busy_s) != len(split) or min(busy_s) <= 0 or min(split) <= 0:
        return None
    speeds = [share / busy for share, busy in zip(split, busy_s, strict=True)]
    return tuple(speed / sum(speeds) for speed in speeds)


class Handle:
    """The positions of one handle, looked up by split."""

    def __init__(self, positions: Positions, number: int) -> None:
        self._positions, self._number = positions, number

    def __len__(self) -> int:
        return len(self._positions)

    def split(self, index: int) -> Split:
        """Return the shares to request for a position."""
        return self._positions[index].split

    def nearest(self, split: Split) -> int:
        """Return the index of the position nearest to a split; shares are evenly spaced."""
        first, last = self._positions[0].asked, self._positions[len(self) - 1].asked
        requested = sum(split[: self._number + 1]) / sum(split)
        if last <= first:
            return 0
        index = round((requested - first) / (last - first) * (len(self) - 1))
        return min(max(index, 0), len(self) - 1)


class ModelSpace:
    """The splits of one model that a search may try.

    Args:
        base: parameters for all trials; its devices are the candidates, its split is ignored.

    Raises:
        NoDevice: a device does not exist on this machine, or cannot be used.
    """

    def __init__(
        self, planner: Planner, base: LoadParams, goal: Goal, forecaster: Forecaster,
        free_bytes: Mapping[str, int] | None = None, modes: Sequence[str] = SPLIT_MODES,
    ) -> None:  # fmt: skip
        self._planner, self._goal, self._forecaster = planner, goal, forecaster
        self._free = forecaster.free_bytes if free_bytes is None else free_bytes
        self._base, self._modes = replace(base, split=None, groups=None), modes
        self._alone: dict[str, float] = {}
        self._known: dict[LoadParams, Candidate | None] = {}
        self._busy: dict[LoadParams, tuple[float, ...]] = {}
        self._families: list[Family] | None = None
        require_devices(base.all_devices, list(forecaster.devices.values()))

    def families(self) -> Sequence[Family]:
        """Return all families, most promising first."""
        if self._families is None:
            self._families = self._made_families()
        return self._families

    def candidate(self, family: Family, split: Split) -> Candidate | None:
        """Return a split in a family; None if it does not fit or a rank would get nothing."""
        return self._candidate(_with(family.params, split))

    def handle(self, family: Family, split: Split, number: int) -> Handle:
        """Return the positions between ranks `number` and `number` + 1; the other shares stay."""
        return Handle(self._planner.positions(replace(family.params, split=split), number), number)

    def expected(self, family: Family) -> Speeds:
        """Return a family's predicted speeds at its start."""
        found = self.candidate(family, family.start)
        assert found is not None, "a family starts where it fits"
        assert found.predicted is not None, "all devices are known"
        return found.predicted

    def regions(self) -> tuple[Region, ...]:
        """Return the ranges of shares over two devices that do not fit."""
        found: list[Region] = []
        two_ranked = (params for params in self._sets_and_modes() if len(params.devices) == 2)
        for family in two_ranked:
            handle = self._planner.positions(replace(family, split=(1.0, 1.0)), 0)
            indices = sorted({round(i * (len(handle) - 1) / N_REGION) for i in range(N_REGION + 1)})
            full = [not self._fits(replace(family, split=handle[i].split)) for i in indices]
            for first, last in ranges(full):
                start, stop = (handle[indices[i]].effective for i in (first, last))
                found.append(Region(family.devices, family.split_mode, start, stop, NOT_FITTING))
        return tuple(found)

    def _made_families(self) -> list[Family]:
        found = [
            family
            for params in self._sets_and_modes()
            if (family := self._started(params)) is not None
        ]
        found = _without_twins(
            sorted(found, key=lambda family: family.predicted_s), self._forecaster.devices
        )
        best = [self._optimised(family) for family in found[:MAX_OPTIMISED]]
        return sorted(best + found[MAX_OPTIMISED:], key=lambda family: family.predicted_s)

    def _sets_and_modes(self) -> Iterator[LoadParams]:
        seen: set[LoadParams] = set()
        for devices in self._sets():
            one = replace(self._base, devices=devices)
            choices = [replace(one, split_mode="tensor")] if len(devices) == 1 else []
            for mode in self._modes if len(devices) > 1 else ():
                sizes = group_sizes(len(devices)) if mode == "groups" else [None]
                choices += [replace(one, split_mode=mode, groups=groups) for groups in sizes]
            yield from (params for params in choices if params not in seen)
            seen.update(choices)

    def _sets(self) -> Iterator[tuple[str, ...]]:
        devices = self._base.devices
        if any(target.startswith("#") for _, target in self._base.overrides):
            yield devices  # overrides refer to ranks by number
            return
        chosen = dict.fromkeys(self._sets_of(range(len(devices))))
        yield from dict.fromkeys(tuple(devices[rank] for rank in ranks) for ranks in chosen)

    def _sets_of(self, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if len(ranks) <= MAX_IN_ALL_SETS:
            for n in range(1, len(ranks) + 1):
                yield from combinations(ranks, n)
            return
        devices = self._base.devices
        for order in (
            sorted(ranks, key=lambda rank: self._alone_s(devices[rank])),
            sorted(ranks, key=lambda rank: -self._free.get(devices[rank], 0)),
        ):
            for n in range(1, len(ranks) + 1):
                yield tuple(sorted(order[:n]))

    def _started(self, params: LoadParams) -> Family | None:
        starts = self._starts(params)
        costs = {split: self._predicted_s(params, split) for split in starts}
        best = min(costs, key=lambda split: costs[split])
        if costs[best] == inf:
            return None
        return Family(params, best, costs[best], can_balance=params.split_mode == "tensor")

    def _starts(self, params: LoadParams) -> list[Split]:
        n = len(params.devices)
        if n == 1:
            return [(1.0,)]
        found = [
            tuple(1 / self._alone_s(device) for device in params.devices),
            tuple(float(max(1, self._free.get(device, 1))) for device in params.devices),
            (1.0,) * n,
        ]
        if n == 2:
            found += [(float(i), 10.0 - i) for i in range(1, 10)]
        return [tuple(share / sum(split) for share in split) for split in found]

    def _alone_s(self, device: str) -> float:
        if device not in self._alone:
            params = replace(self._base, devices=(device,), split_mode="tensor")
            found = self._speeds(params, self._planner.evaluate(params, self._free))
            self._alone[device] = self._goal.seconds(found[0].prefill_ts, found[0].decode_ts)
        return self._alone[device]

    def _optimised(self, family: Family) -> Family:
        split = self._balanced(family) if family.can_balance else family.start
        for number in range(family.n_ranks - 1):
            handle = self.handle(family, split, number)
            start = handle.nearest(split)
            costs = {start: self._predicted_s(family.params, split)}

            def cost(index: int, handle: Handle = handle, costs: dict[int, float] = costs) -> float:
                if index not in costs:
                    costs[index] = self._predicted_s(family.params, handle.split(index))
                return costs[index]

            best = minimise(cost, len(handle), start, max(1, len(handle) // 10), 1)
            split = split if best == start else handle.split(best)
        return replace(family, start=split, predicted_s=self._predicted_s(family.params, split))

    def _balanced(self, family: Family) -> Split:
        split = family.start
        for _ in range(MAX_BALANCED):
            better = balanced(split, self._busy[_with(family.params, split)])
            if better is None or not (
                self._predicted_s(family.params, better) < self._predicted_s(family.params, split)
            ):
                break
            split = better
        return split

    def _predicted_s(self, params: LoadParams, split: Split) -> float:
        found = self._candidate(_with(params, split))
        if found is None or found.predicted is None:
            return inf
        return self._goal.seconds(found.predicted.prefill_ts, found.predicted.decode_ts)

    def _candidate(self, params: LoadParams) -> Candidate | None:
        if params not in self._known:
            self._known[params] = self._evaluated(params)
        return self._known[params]

    def _evaluated(self, params: LoadParams) -> Candidate | None:
        try:
            evaluation = self._planner.evaluate(params, self._free)
        except EngineError:  # this model cannot be split that way
            return None
        plan = evaluation.plan
        shares = tuple(device.effective for device in plan.devices)
        if not all(shares[: len(params.devices)]) or plan.shortages(self._free):
            return None
        speeds, reason = self._speeds(params, evaluation)
        key = params.all_devices, evaluation.split
        return Candidate(params, key, shares, speeds, reason)

    def _speeds(self, params: LoadParams, evaluation: Evaluation) -> tuple[Speeds, str]:
        found = self._forecaster.forecast(evaluation, params, self._planner.info.quant)
        assert found is not None, "all devices are known"
        self._busy[params] = tuple(
            self._goal.n_prompt * prefill.busy_s / found.prefill.n_tokens
            + self._goal.n_gen * decode.busy_s
            for prefill, decode in zip(found.prefill.ranks, found.decode.ranks, strict=True)
        )
        return Speeds(found.prefill.tokens_per_s, found.decode.tokens_per_s), found.decode.reason

    def _fits(self, params: LoadParams) -> bool:
        try:
            plan = self._planner.plan(params, self._free)
        except EngineError:
            return False
        return not plan.shortages(self._free)


def _with(params: LoadParams, split: Split) -> LoadParams:
    return replace(params, split=split if len(split) > 1 else None)


def group_sizes(n_ranks: int) -> list[tuple[int, ...] | None]:
    """Return the possible groupings of n ranks, except any that are equivalent to another mode."""
    if n_ranks < 3:
        return []
    if n_ranks > MAX_IN_ALL_GROUPS:
        equal = [n for n in range(2, n_ranks // 2 + 1) if n_ranks % n == 0]
        return [None, *((n,) * (n_ranks // n) for n in equal)]
    cuts = (c for n in range(1, n_ranks - 1) for c in combinations(range(1, n_ranks), n))
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, n_ranks), strict=True)) for cut in cuts]


def _without_twins(families: Sequence[Family], devices: Mapping[str, DeviceInfo]) -> list[Family]:
    """Return the families without those that only repeat another family on equal devices."""
    found: dict[object, Family] = {}
    for family in families:
        params = family.params
        kinds = tuple(devices[device].name for device in params.devices)
        about = f"{family.predicted_s:.3g}"
        found.setdefault((kinds, params.split_mode, params.group_sizes, about), family)
    return list(found.values())
