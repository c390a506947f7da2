"""What a person chose in the split panel: an immutable value, without widgets.

Every change returns a new `SplitSettings` in which the shares of the ranks that are on sum to 1
and those that are off are 0. Ranks name physical devices; the CPU may stand for several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from engine import KV_TYPES, DeviceInfo, LoadParams

Mode = Literal["single", "tensor", "layer"]
MODES: Final[tuple[Mode, ...]] = ("single", "tensor", "layer")
MAX_CPU_RANKS: Final = 8
MAX_CONTEXT: Final = 1 << 24
MAX_THREADS: Final = 1024


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank.

    Attributes:
        device: id such as "cuda:0"; repeated for virtual devices.
        key: what the device is recognised by after a restart: its UUID, or its id.
        share: 0 to 1; 0 while the rank is off.
    """

    device: str
    key: str
    is_on: bool
    share: float


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """The split and what else decides where the bytes go.

    Attributes:
        single: index of the rank that takes everything in the mode "single"; the shares of the
            other modes are kept for when the person comes back to them.
        n_ctx: None leaves the context length to the engine.
        cpu_threads: None is one per core.
    """

    ranks: tuple[Rank, ...] = ()
    mode: Mode = "single"
    single: int = 0
    n_ctx: int | None = None
    kv_type: str = "f16"
    cpu_threads: int | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of every rank in the current mode; they sum to 1."""
        if self.mode == "single":
            return tuple(float(i == self.single) for i in range(len(self.ranks)))
        return tuple(rank.share for rank in self.ranks)

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the ranks that take part; the engine numbers its ranks in this order."""
        if self.mode == "single":
            return (self.single,) if self.ranks else ()
        return tuple(i for i, rank in enumerate(self.ranks) if rank.is_on)

    @property
    def n_cpu_ranks(self) -> int:
        return sum(rank.device == "cpu" for rank in self.ranks)

    def boundary(self, handle: int) -> float:
        """Where, from 0 to 1, active rank number `handle` ends and the next begins."""
        return math.fsum(self.shares[i] for i in self.active[: handle + 1])

    def load_params(self, path: str) -> LoadParams:
        """What the engine is asked to load.

        Raises:
            EngineError: there is no device.
        """
        return LoadParams(
            path=path,
            devices=tuple(self.ranks[i].device for i in self.active),
            split=tuple(self.shares[i] for i in self.active) if len(self.active) > 1 else None,
            split_mode="layer" if self.mode == "layer" else "tensor",
            n_ctx=self.n_ctx,
            kv_type=self.kv_type,
            cpu_threads=self.cpu_threads,
        )

    # changes

    def with_mode(self, mode: Mode) -> SplitSettings:
        return replace(self, mode=mode)

    def with_share(self, index: int, share: float) -> SplitSettings:
        """Give one rank `share`; the others keep their proportions among themselves."""
        if self.mode == "single" or index not in self.active:
            return self
        others = [i for i in self.active if i != index]
        if not others:
            return self
        share = min(1.0, max(0.0, share))
        weights = _normalised([self.ranks[i].share for i in others])
        shares = {index: share} | {
            i: (1.0 - share) * weight for i, weight in zip(others, weights, strict=True)
        }
        return self._with_shares(shares)

    def with_boundary(self, handle: int, position: float) -> SplitSettings:
        """Move the boundary between two neighbours; all other ranks keep their shares."""
        active = self.active
        if self.mode == "single" or not 0 <= handle < len(active) - 1:
            return self
        left, right = active[handle], active[handle + 1]
        start = self.boundary(handle - 1) if handle else 0.0
        both = self.ranks[left].share + self.ranks[right].share
        share = min(both, max(0.0, position - start))
        return self._with_shares({left: share, right: both - share})

    def with_weights(self, weights: Sequence[float]) -> SplitSettings:
        """Shares in proportion to one weight per rank; ranks that are off stay at 0."""
        on = [i for i, rank in enumerate(self.ranks) if rank.is_on]
        shares = _normalised([weights[i] for i in on])
        return self._with_shares(dict(zip(on, shares, strict=True)))

    def with_rank_on(self, index: int, is_on: bool) -> SplitSettings:
        """Switch a rank; in the mode "single" the one switched on takes all.

        A rank that joins takes an even share from all others. The last one stays on.
        """
        if self.mode == "single":
            return replace(self, single=index) if is_on else self
        on = [i for i in self.active if i != index]
        if self.ranks[index].is_on == is_on or not on:
            return self
        ranks = list(self.ranks)
        ranks[index] = replace(ranks[index], is_on=is_on, share=0.0)
        changed = replace(self, ranks=tuple(ranks))
        if is_on:
            return changed.with_share(index, 1.0 / (len(on) + 1))
        return changed.with_weights([rank.share for rank in changed.ranks])

    def with_cpu_ranks(self, count: int) -> SplitSettings:
        """Have `count` ranks on the CPU, by adding or removing at the end.

        More than one means that the person wants a split, so the mode "single" is left.
        """
        count = min(MAX_CPU_RANKS, max(1, count))
        cpu = [i for i, rank in enumerate(self.ranks) if rank.device == "cpu"]
        if not cpu or count == len(cpu):
            return self
        if count < len(cpu):
            ranks = tuple(rank for i, rank in enumerate(self.ranks) if i not in cpu[count:])
            single = min(self.single, len(ranks) - 1)
            return replace(self, ranks=_ensure_on(ranks), single=single)._renormalised()
        changed = self if self.mode != "single" else self.with_mode("tensor")
        for _ in range(count - len(cpu)):
            last = changed.ranks[cpu[0]]
            added = Rank(last.device, last.key, is_on=False, share=0.0)
            changed = replace(changed, ranks=(*changed.ranks, added))
            changed = changed.with_rank_on(len(changed.ranks) - 1, True)
        return changed

    def _with_shares(self, shares: Mapping[int, float]) -> SplitSettings:
        ranks = tuple(replace(r, share=shares.get(i, r.share)) for i, r in enumerate(self.ranks))
        return replace(self, ranks=ranks)

    def _renormalised(self) -> SplitSettings:
        return self.with_weights([rank.share for rank in self.ranks])


def default_settings(devices: Sequence[DeviceInfo]) -> SplitSettings:
    """All usable GPUs by the size of their memory, or the CPU where there are none."""
    usable = [device for device in devices if device.usable]
    has_gpu = any(device.kind == "cuda" for device in usable)
    ranks = tuple(
        Rank(device.id, device.uuid or device.id, device.kind == "cuda" or not has_gpu, 0.0)
        for device in usable
    )
    n_on = sum(rank.is_on for rank in ranks)
    first = SplitSettings(ranks=ranks, mode="tensor" if n_on > 1 else "single")
    return first.with_weights([device.total_bytes for device in usable])


def to_dict(settings: SplitSettings) -> dict[str, Any]:
    """The settings as JSON can hold them."""
    return {
        "mode": settings.mode,
        "single": settings.single,
        "ranks": [
            {"device": rank.key, "on": rank.is_on, "share": rank.share} for rank in settings.ranks
        ],
        "n_ctx": settings.n_ctx,
        "kv_type": settings.kv_type,
        "cpu_threads": settings.cpu_threads,
    }


def from_dict(data: Mapping[str, Any], devices: Sequence[DeviceInfo]) -> SplitSettings:
    """Restore what `to_dict` gave, on the devices that are here now.

    Devices that are gone are dropped, new ones come in switched off, and whatever in `data` makes
    no sense is replaced by the default: the file may be damaged or of another version.
    """
    settings = _with_saved_ranks(default_settings(devices), data.get("ranks"))
    mode, single = data.get("mode"), data.get("single")
    kv_type = data.get("kv_type")
    return replace(
        settings,
        mode=mode if mode in MODES else settings.mode,
        single=_whole(single, 0, len(settings.ranks) - 1) or 0,
        n_ctx=_whole(data.get("n_ctx"), 1, MAX_CONTEXT),
        kv_type=kv_type if kv_type in KV_TYPES else settings.kv_type,
        cpu_threads=_whole(data.get("cpu_threads"), 1, MAX_THREADS),
    )


def _with_saved_ranks(settings: SplitSettings, saved: object) -> SplitSettings:
    known = [rank.key for rank in settings.ranks]
    entries = [
        entry
        for entry in (saved if isinstance(saved, list) else [])
        if isinstance(entry, Mapping) and entry.get("device") in known
    ]
    if not entries:
        return settings
    settings = settings.with_cpu_ranks(sum(entry["device"] == "cpu" for entry in entries) or 1)
    ranks: list[Rank] = []
    for rank in settings.ranks:
        match = next((entry for entry in entries if entry["device"] == rank.key), None)
        if match is None:
            ranks.append(replace(rank, is_on=False, share=0.0))
            continue
        entries.remove(match)
        is_on = match.get("on") is True
        ranks.append(replace(rank, is_on=is_on, share=_share(match.get("share")) * is_on))
    return replace(settings, ranks=_ensure_on(tuple(ranks)))._renormalised()


def _ensure_on(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Switch the first rank on where none is."""
    if not ranks or any(rank.is_on for rank in ranks):
        return ranks
    return (replace(ranks[0], is_on=True), *ranks[1:])


def _normalised(weights: Sequence[float]) -> list[float]:
    """Weights scaled to sum to 1; even ones where all are 0."""
    total = math.fsum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * len(weights) if weights else []
    return [weight / total for weight in weights]


def _share(value: object) -> float:
    if not isinstance(value, int | float):
        return 0.0
    return float(min(1.0, max(0.0, value)))  # 0 for NaN; cut first, as a huge int has no float


def _whole(value: object, low: int, high: int) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and low <= value <= high else None  # type: ignore[operator,return-value]


def is_same_load(first: LoadParams, second: LoadParams, n_ctx_train: int) -> bool:
    """Whether both would load the same model in the same way, to a rounding error of the shares."""
    return _load_key(first, n_ctx_train) == _load_key(second, n_ctx_train)


def _load_key(params: LoadParams, n_ctx_train: int) -> tuple[object, ...]:
    n_ranks = len(params.devices)
    shares = _normalised(params.split or [1.0] * n_ranks)
    return (
        params.path,
        params.devices,
        params.split_mode if n_ranks > 1 else "",
        tuple(round(share, 6) for share in shares),
        params.context_for(n_ctx_train),
        params.overrides,
        params.kv_type,
        params.cpu_threads,
        params.n_batch,
    )
