"""What fits: the longest context, what to do where something does not, and shares by memory.

Whatever is proposed has been evaluated and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engine.devices.types import CPU
from engine.errors import EngineError
from engine.forward.state import KV_INFO
from engine.planning.plan import beside_reserve

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.planning.plan import Plan

CONTEXT_STEP = 256
"""Contexts are proposed in such steps."""

LONGEST = 1 << 17
"""Of a model that does not say what it was trained for."""

N_TRIES = 12
"""How often shares are corrected before a split counts as impossible."""

MARGIN = 0.99
"""Of a device's memory: shares are met only to a unit."""

Split = tuple[float, ...]
RemedyKind = Literal["split", "devices", "kv_type", "context", "experts", "kv_on_host", "blocks"]


@dataclass(frozen=True, slots=True)
class Room:
    """What a plan may use.

    Attributes:
        device: "cpu", "cuda:0" and so on; also one that is only simulated.
        free_bytes: before anything is loaded.
        bytes_per_s: how fast it reads its memory; what decides which device is faster.
    """

    device: str
    free_bytes: int
    bytes_per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """A way to load a model that does not fit as it was asked for.

    Attributes:
        kind: what it changes.
        sentence: for people.
        params: what to load.
    """

    kind: RemedyKind
    sentence: str
    params: LoadParams


class Fit:
    """Answers for one model and one machine.

    Args:
        plan: evaluates what to load, given free memory by device.
        rooms: the devices that there are.
        n_ctx_train: tokens that the model was trained for; 0 if unknown.
        n_layer: blocks of the model.
    """

    def __init__(
        self,
        plan: Callable[[LoadParams, Mapping[str, int]], Plan],
        rooms: Sequence[Room],
        n_ctx_train: int,
        n_layer: int,
    ) -> None:
        self._evaluate = plan
        self._rooms = {room.device: room for room in rooms}
        self._free = {room.device: room.free_bytes for room in rooms}
        self._n_ctx_train = n_ctx_train
        self._n_layer = n_layer

    def shortages(self, params: LoadParams) -> dict[str, int]:
        """The bytes that devices lack; empty where everything fits.

        Raises:
            EngineError: the split cannot be made.
        """
        return self._plan(params).shortages(self._free)

    def _plan(self, params: LoadParams) -> Plan:
        return self._evaluate(params, self._free)

    def fits(self, params: LoadParams) -> bool:
        """Whether it can be made and everything has room."""
        try:
            return not self.shortages(params)
        except EngineError:
            return False

    def largest_context(self, params: LoadParams) -> int:
        """The most tokens of context that fit with this split, up to what the model was trained
        for; 0 if none do.

        Raises:
            EngineError: the split cannot be made.
        """
        self._plan(params)
        most = self._n_ctx_train or LONGEST
        if self.fits(replace(params, n_ctx=most)):
            return most
        steps = _last(most // CONTEXT_STEP, lambda n: self.fits(_at(params, n * CONTEXT_STEP)))
        return steps * CONTEXT_STEP

    def remedies(self, params: LoadParams) -> list[Remedy]:
        """What to do where `params` do not fit, the cheapest first; empty where they do.

        Raises:
            EngineError: the split cannot be made.
        """
        if not self.shortages(params):
            return []
        ways = (
            self._other_split, self._more_devices, self._shorter_keys, self._shorter_context,
            self._experts_on_cpu, self._kv_on_host, self._blocks_on_cpu, self._cpu_alone,
        )  # fmt: skip
        return [remedy for way in ways if (remedy := way(params)) is not None]

    def _other_split(self, params: LoadParams) -> Remedy | None:
        """The same devices, each with what it has room for."""
        found = self.balanced(params)
        if found is None:
            return None
        even = (1.0,) * len(found.devices)
        shares = ",".join(f"{share:g}" for share in found.split or even)
        return Remedy("split", f"Split it {shares}; every device has room for that.", found)

    def _more_devices(self, params: LoadParams) -> Remedy | None:
        """With further GPUs, as few as do."""
        unused = [d for d in self._by_speed() if d not in params.devices and d != CPU]
        for n in range(1, len(unused) + 1):
            found = self.balanced(replace(params, devices=params.devices + tuple(unused[:n])))
            if found is not None:
                return Remedy("devices", f"Use {_listed(unused[:n])} as well.", found)
        return None

    def _shorter_keys(self, params: LoadParams) -> Remedy | None:
        """Keys and values in fewer bits."""
        bits = _kv_bits(params.kv_type)
        for kv_type in ("q8_0", "q4_0"):
            found = replace(params, kv_type=kv_type)
            if _kv_bits(kv_type) < bits and self.fits(found):
                return Remedy("kv_type", f"Hold keys and values as {kv_type}.", found)
        return None

    def _shorter_context(self, params: LoadParams) -> Remedy | None:
        n_ctx = self.largest_context(params)
        if not n_ctx:
            return None
        sentence = f"Choose a context of {n_ctx:,} tokens; that is the longest that fits."
        return Remedy("context", sentence, replace(params, n_ctx=n_ctx))

    def _experts_on_cpu(self, params: LoadParams) -> Remedy | None:
        found = self._fewest(params, params.n_cpu_moe, _with_moe)
        if found is None:
            return None
        sentence = f"Put the experts of {found.n_cpu_moe} blocks on the CPU."
        return Remedy("experts", sentence, found)

    def _kv_on_host(self, params: LoadParams) -> Remedy | None:
        found = replace(params, kv_on_host=True)
        if params.kv_on_host or CPU not in self._free or not self.fits(found):
            return None
        return Remedy("kv_on_host", "Keep keys and values in the host's memory.", found)

    def _blocks_on_cpu(self, params: LoadParams) -> Remedy | None:
        found = self._fewest(params, params.n_cpu_blocks, _with_blocks)
        if found is None:
            return None
        return Remedy("blocks", f"Put {found.n_cpu_blocks} blocks on the CPU.", found)

    def _cpu_alone(self, params: LoadParams) -> Remedy | None:
        found = replace(params, devices=(CPU,), split=None)
        if set(params.devices) == {CPU} or CPU not in self._free or not self.fits(found):
            return None
        return Remedy("devices", "Use the CPU alone.", found)

    def _fewest(
        self, params: LoadParams, least: int, with_n: Callable[[LoadParams, int], LoadParams]
    ) -> LoadParams | None:
        """As few blocks, or experts of blocks, on the CPU as let everything fit.

        Args:
            least: how many are there already.
            with_n: gives the parameters with so many.
        """
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
        """The same with shares by which it fits; None if there are none.

        They follow the devices' speed as far as memory allows.

        Args:
            in_turn: devices compute one after the other: the fastest gets as much as it can hold.
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
        """Shares with which fast devices are full before slower ones get anything; empty where the
        split cannot be made."""
        try:
            left = float(sum(self._plan(params).bytes_by_device().values()))
        except EngineError:
            return ()
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
        """The same with as few digits as fit, and even shares unsaid."""
        shares = params.split or ()
        if len(set(shares)) == 1:
            return replace(params, split=None)
        rounded = (replace(params, split=tuple(round(s, n) for s in shares)) for n in (1, 2, 3))
        return next((p for p in rounded if self._is_near(p, shares) and self.fits(p)), params)

    def _is_near(self, params: LoadParams, shares: Split) -> bool:
        """Whether no share is off by a tenth."""
        split = params.split or ()
        return all(abs(a - b) <= b / 10 for a, b in zip(split, shares, strict=True))

    def with_cpu(self, params: LoadParams, gpus: tuple[str, ...]) -> LoadParams:
        """What GPUs can hold there, by their memory, the rest on the CPU; all of it on the CPU
        where that does not help."""
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

    def _by_speed(self) -> list[str]:
        """All devices, the fastest first."""
        return sorted(self._rooms, key=lambda device: -self._rooms[device].bytes_per_s)


def _at(params: LoadParams, n_ctx: int) -> LoadParams:
    return replace(params, n_ctx=n_ctx)


def _with_moe(params: LoadParams, n: int) -> LoadParams:
    return replace(params, n_cpu_moe=n)


def _with_blocks(params: LoadParams, n: int) -> LoadParams:
    return replace(params, n_cpu_blocks=n)


def _last(n: int, is_so: Callable[[int], bool]) -> int:
    """The largest number from 1 to `n` for which something is so that ceases to be so; 0 if it
    never is."""
    low, high = 0, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_so(middle):
            low = middle
        else:
            high = middle
    return low


def _kv_bits(kv_type: str) -> float:
    info = KV_INFO[kv_type]
    return 8 * info.type_size / info.block_size


def _corrected(
    split: Split, devices: Sequence[str], needed: Mapping[str, int], usable: Mapping[str, int]
) -> Split:
    """Less for devices that are full, more for those with room; empty where none has any.

    What a device needs beside its share of the model is taken to grow with it, so this comes near
    an answer in steps.
    """
    load = {d: needed.get(d, 0) / max(1, MARGIN * usable.get(d, 0)) for d in devices}
    kept = [share / max(1.0, load[d]) for share, d in zip(split, devices, strict=True)]
    room = [
        max(0.0, MARGIN * usable.get(d, 0) - needed.get(d, 0)) / devices.count(d) for d in devices
    ]
    free = 1.0 - sum(kept)
    if not sum(room):
        return ()
    return tuple(k + free * r / sum(room) for k, r in zip(kept, room, strict=True))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
