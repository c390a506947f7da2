"""The longest context that fits, remedies if a model does not fit, and shares by memory.

Every proposal has been evaluated and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engine.errors import EngineError, Sentence, listed
from engine.hardware.devices.types import CPU
from engine.load_params import KVTypes, kv_types
from engine.model.forward.state import KV_INFO
from engine.planning.plan import beside_reserve

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.plan import Plan

COMFORT = 0.75
"""Fraction of a device's free memory used for a model with an automatic context; the rest is left
to other programs."""

CONTEXT_STEP = 256
"""Step between proposed context lengths, in tokens."""

MAX_CONTEXT = 1 << 17
"""Longest context proposed for a model whose training context is unknown, in tokens."""

SMALLER_KV_TYPES = ("q8_0", "q8_0/q4_0", "q4_0")
"""KV types to propose, largest first; keys have outliers, which Q4_0 rounds more coarsely (arXiv
2402.02750)."""

N_TRIES = 12
"""Number of corrections to the shares before a split is considered impossible."""

MARGIN = 0.99
"""Fraction of a device's memory that shares may fill; shares are only met to the nearest unit."""

Split = tuple[float, ...]
RemedyKind = Literal[
    "split", "devices", "parallel", "kv_type", "context", "experts", "kv_on_host", "blocks"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Room:
    """Memory on one device that a plan may use.

    Attributes:
        device: its id, such as "cpu" or "cuda:0"; it may be simulated.
        bytes_per_s: its memory bandwidth, by which devices are ordered.
    """

    device: str
    free_bytes: int
    bytes_per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a model fit."""

    kind: RemedyKind
    sentence: str
    params: LoadParams


class Fit:
    """Finder of splits and contexts with which one model fits on one machine.

    Args:
        plan: returns the plan for given parameters and free memory by device.
        n_ctx_train: context length that the model was trained for, in tokens; 0 if unknown.
    """

    def __init__(
        self, plan: Callable[[LoadParams, Mapping[str, int]], Plan], rooms: Sequence[Room],
        n_ctx_train: int, n_layer: int,
    ) -> None:  # fmt: skip
        self._evaluate = plan
        self._rooms = {room.device: room for room in rooms}
        self._free = {room.device: room.free_bytes for room in rooms}
        self._n_ctx_train = n_ctx_train
        self._n_layer = n_layer

    @classmethod
    def comfortable(
        cls, plan: Callable[[LoadParams, Mapping[str, int]], Plan], free_bytes: Mapping[str, int],
        n_ctx_train: int, n_layer: int,
    ) -> Fit:  # fmt: skip
        """Return a finder for this machine that leaves memory for other programs."""
        rooms = [Room(device, int(COMFORT * size)) for device, size in free_bytes.items()]
        return cls(plan, rooms, n_ctx_train, n_layer)

    def shortages(self, params: LoadParams) -> dict[str, int]:
        """Return how many bytes each device lacks; empty if everything fits.

        Raises:
            EngineError: the split is impossible.
        """
        return self._plan(params).shortages(self._free)

    def _plan(self, params: LoadParams) -> Plan:
        return self._evaluate(params, self._free)

    def fits(self, params: LoadParams) -> bool:
        """Return whether the split is possible and everything fits."""
        try:
            return not self.shortages(params)
        except EngineError:
            return False

    def largest_context(self, params: LoadParams) -> int:
        """Return the longest context that fits with this split, in tokens; 0 if none does.

        It is at most the model's training context.

        Raises:
            EngineError: the split is impossible.
        """
        self._plan(params)
        most = self._n_ctx_train or MAX_CONTEXT
        if self.fits(replace(params, n_ctx=most)):
            return most
        steps = _last(most // CONTEXT_STEP, lambda n: self.fits(_at(params, n * CONTEXT_STEP)))
        return steps * CONTEXT_STEP

    def remedies(self, params: LoadParams) -> list[Remedy]:
        """Return changes that make `params` fit, cheapest first; empty if `params` already fit.

        Raises:
            EngineError: the split is impossible.
        """
        if not self.shortages(params):
            return []
        ways = (
            self._other_split, self._more_devices, self._fewer_requests, self._smaller_kv_type,
            self._shorter_context, self._experts_on_cpu, self._kv_on_host, self._blocks_on_cpu,
            self._cpu_alone,
        )  # fmt: skip
        return [remedy for way in ways if (remedy := way(params)) is not None]

    def _other_split(self, params: LoadParams) -> Remedy | None:
        found = self.balanced(params)
        if found is None:
            return None
        even = (1.0,) * len(found.devices)
        shares = ",".join(f"{share:g}" for share in found.split or even)
        sentence = Sentence("Split it {shares}, so that every device has room.", shares=shares)
        return Remedy("split", sentence, found)

    def _more_devices(self, params: LoadParams) -> Remedy | None:
        # adds as few GPUs as suffice
        by_speed = sorted(self._rooms, key=lambda device: -self._rooms[device].bytes_per_s)
        unused = [d for d in by_speed if d not in params.devices and d != CPU]
        for n in range(1, len(unused) + 1):
            found = self.balanced(replace(params, devices=params.devices + tuple(unused[:n])))
            if found is not None:
                sentence = Sentence("Use {devices} as well.", devices=listed(unused[:n]))
                return Remedy("devices", sentence, found)
        return None

    def _fewer_requests(self, params: LoadParams) -> Remedy | None:
        n = _last(params.parallel - 1, lambda n: self.fits(replace(params, parallel=n)))
        if not n:
            return None
        sentence = Sentence(
            "Leave room for {n} request of the full context length."
            if n == 1
            else "Leave room for {n} parallel requests of the full context length.",
            n=n,
        )
        return Remedy("parallel", sentence, replace(params, parallel=n))

    def _smaller_kv_type(self, params: LoadParams) -> Remedy | None:
        before = kv_types(params.kv_type)
        for kv_type in SMALLER_KV_TYPES:
            wanted = zip(before, kv_types(kv_type), strict=True)
            smaller = KVTypes(*(min(pair, key=_kv_bits) for pair in wanted))
            found = replace(params, kv_type=str(smaller))
            if smaller != before and self.fits(found):
                sentence = Sentence("Use a {kv_type} KV cache.", kv_type=str(smaller))
                return Remedy("kv_type", sentence, found)
        return None

    def _shorter_context(self, params: LoadParams) -> Remedy | None:
        n_ctx = self.largest_context(params)
        if not n_ctx:
            return None
        sentence = Sentence("Use a context of {n:,} tokens, the longest that fits.", n=n_ctx)
        return Remedy("context", sentence, replace(params, n_ctx=n_ctx))

    def _experts_on_cpu(self, params: LoadParams) -> Remedy | None:
        found = self._fewest(params, params.n_cpu_moe, _with_moe)
        if found is None:
            return None
        sentence = Sentence("Put the experts of {n} blocks on the CPU.", n=found.n_cpu_moe)
        return Remedy("experts", sentence, found)

    def _kv_on_host(self, params: LoadParams) -> Remedy | None:
        found = replace(params, kv_on_host=True)
        if params.kv_on_host or CPU not in self._free or not self.fits(found):
            return None
        return Remedy("kv_on_host", Sentence("Keep the KV cache in host memory."), found)

    def _blocks_on_cpu(self, params: LoadParams) -> Remedy | None:
        found = self._fewest(params, params.n_cpu_blocks, _with_blocks)
        if found is None:
            return None
        sentence = Sentence("Put {n} blocks on the CPU.", n=found.n_cpu_blocks)
        return Remedy("blocks", sentence, found)

    def _cpu_alone(self, params: LoadParams) -> Remedy | None:
        found = replace(params, devices=(CPU,), split=None)
        if set(params.devices) == {CPU} or CPU not in self._free or not self.fits(found):
            return None
        return Remedy("devices", Sentence("Use only the CPU."), found)

    def _fewest(
        self, params: LoadParams, least: int, with_n: Callable[[LoadParams, int], LoadParams]
    ) -> LoadParams | None:
        """Return `params` with as few blocks, or blocks' experts, on the CPU as needed to fit."""
        if CPU not in self._free or set(params.devices) == {CPU}:
            return None

        def are_too_few(more: int) -> bool:
            try:
                short = self.shortages(with_n(params, least + more))
            except EngineError:
                return False
            return any(device != CPU for device in short)

        more = 1 + _last(self._n_layer - least, are_too_few)
        found = with_n(params, least + more)
        return found if least + more <= self._n_layer and self.fits(found) else None

    def balanced(self, params: LoadParams, *, in_turn: bool = False) -> LoadParams | None:
        """Return `params` with shares that fit, proportional to speed if possible; None if none do.

        Args:
            in_turn: whether devices compute one after the other, so that the fastest should hold
                as much as it can.
        """
        speeds = [self._speed(device) for device in params.devices]
        split = tuple(speed / sum(speeds) for speed in speeds)
        usable = beside_reserve(self._free, params.reserve)
        if in_turn and len(set(speeds)) > 1:
            split = self._filled(replace(params, split=split), usable) or split
        for _ in range(N_TRIES):
            found = replace(params, split=split)
            try:
                plan = self._plan(found)
            except EngineError:
                return None
            if not plan.shortages(self._free):
                return self._in_round_numbers(found)
            split = _corrected(split, params.devices, plan.bytes_by_device(), usable)
            if not split:
                return None
        return None

    def _filled(self, params: LoadParams, usable: Mapping[str, int]) -> Split:
        """Return shares that fill fast devices first; empty if the split is impossible."""
        try:
            needed = self._plan(params).bytes_by_device()
        except EngineError:
            return ()
        left = float(sum(needed.get(device, 0) for device in set(params.devices)))
        total, found = left, dict.fromkeys(range(len(params.devices)), 0.0)
        for rank in sorted(found, key=lambda rank: -self._speed(params.devices[rank])):
            device = params.devices[rank]
            room = MARGIN * usable.get(device, 0) / params.devices.count(device)
            found[rank] = min(left, room)
            left -= found[rank]
        return tuple((size + left / len(found)) / total for size in found.values())

    def _speed(self, device: str) -> float:
        return self._rooms[device].bytes_per_s if device in self._rooms else 1.0

    def _in_round_numbers(self, params: LoadParams) -> LoadParams:
        # with the fewest digits that still fit, and without shares if they are even
        shares = params.split or ()
        if len(set(shares)) == 1:
            return replace(params, split=None)
        rounded = (replace(params, split=tuple(round(s, n) for s in shares)) for n in (1, 2, 3))
        return next((p for p in rounded if self._is_near(p, shares) and self.fits(p)), params)

    def _is_near(self, params: LoadParams, shares: Split) -> bool:
        return all(abs(a - b) <= b / 10 for a, b in zip(params.split or (), shares, strict=True))

    def with_cpu(self, params: LoadParams, gpus: tuple[str, ...]) -> LoadParams:
        """Return `params` with as much as fits on the GPUs, by memory, and the rest on the CPU.

        Everything is on the CPU if GPUs do not help.
        """
        alone = replace(params, devices=(CPU,), split=None)
        if not gpus:
            return alone
        rooms = [max(1, self._free[gpu]) for gpu in gpus]
        split = tuple(round(room / sum(rooms), 3) for room in rooms)
        even = len(set(split)) == 1
        on_gpus = replace(params, devices=gpus, split=None if even else split)
        found = self._fewest(on_gpus, 0, _with_moe) or self._fewest(on_gpus, 0, _with_blocks)
        if found is not None:
            return found
        return alone if CPU in self._free else on_gpus


def _at(params: LoadParams, n_ctx: int) -> LoadParams:
    return replace(params, n_ctx=n_ctx)


def _with_moe(params: LoadParams, n: int) -> LoadParams:
    return replace(params, n_cpu_moe=n)


def _with_blocks(params: LoadParams, n: int) -> LoadParams:
    return replace(params, n_cpu_blocks=n)


def _last(n: int, is_so: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `n` for which the monotonic `is_so` holds, or 0."""
    low, high = 0, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_so(middle):
            low = middle
        else:
            high = middle
    return low


def _kv_bits(kind: str) -> float:
    info = KV_INFO[kind]
    return 8 * info.type_size / info.block_size


def _corrected(
    split: Split, devices: Sequence[str], needed: Mapping[str, int], usable: Mapping[str, int]
) -> Split:
    """Return shares shifted from full devices to those with room; empty if all are full."""
    load = {d: needed.get(d, 0) / max(1, MARGIN * usable.get(d, 0)) for d in devices}
    kept = [share / max(1.0, load[d]) for share, d in zip(split, devices, strict=True)]
    room = [
        max(0.0, MARGIN * usable.get(d, 0) - needed.get(d, 0)) / devices.count(d) for d in devices
    ]
    free = 1.0 - sum(kept)
    if not sum(room):
        return ()
    return tuple(k + free * r / sum(room) for k, r in zip(kept, room, strict=True))
