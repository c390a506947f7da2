"""Split settings as immutable values, and their conversion to and from load parameters.

Every change returns a new `SplitSettings` in which active ranks' shares sum to 1 and all others
are 0. A locked rank keeps its share when others change. The CPU can have several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeVar

from app.core.translation import tr_later
from engine import (
    DEFAULT_DRAFTED,
    LOAD_DEFAULTS,
    MAX_DRAFTED,
    MMPROJ_KINDS,
    SHARED_LOAD_OPTIONS,
    DeviceInfo,
    LoadOption,
    LoadOptions,
    LoadParams,
    is_cpu,
    load_option,
    machine_of,
)

T = TypeVar("T")

Mode = Literal["single", "tensor", "layer", "groups"]
MODES: Final[tuple[Mode, ...]] = ("single", "tensor", "layer", "groups")
MAX_CPU_RANKS: Final = 8

GGUF_SUFFIX = ".gguf"

OWN_BLOCK = "mtp"  # value of `SplitSettings.draft_path` for the model's MTP block


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings for one rank.

    Attributes:
        device: device id, for example "cuda:0"; virtual ranks on one device share it.
        key: the device's UUID, or its id if it has none.
        share: fraction of the model, 0 to 1; 0 while the rank is off.
        is_locked: whether the share stays the same when others change.
        joins: in mode "groups", whether the rank is in the same group as the previous rank.
    """

    device: str
    key: str
    is_on: bool
    share: float
    is_locked: bool = False
    joins: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether the rank is on a CPU, on this or another machine."""
        return is_cpu(self.device)


@dataclass(frozen=True, slots=True)
class SplitSettings(LoadOptions):
    """The split and all other settings that determine the memory used on each device.

    Attributes:
        ranks: all ranks in order, on or off.
        single: index of the rank that holds the model in mode "single"; `ranks` keeps the shares
            for the other modes.
        n_draft: maximum number of draft tokens per step; 0 turns speculative decoding off.
        draft_path: draft model file, "mtp" for the model's own MTP block, "" for neither; reset
            when another model is selected.
    """

    ranks: tuple[RankSettings, ...] = ()
    mode: Mode = "single"
    single: int = 0
    n_draft: int = load_option(
        DEFAULT_DRAFTED, kind=int, low=0, high=MAX_DRAFTED, place="rare",
        title=tr_later("Draft tokens"),
        tip=tr_later(
            "Maximum number of draft tokens per step. They come from the text so far, and from "
            "the model's MTP block if it has one. Answers stay the same; repetitive text is "
            "generated faster. 0 turns speculative decoding off"
        ),
    )  # fmt: skip
    draft_path: str = load_option(
        "", place="rare", title=tr_later("Draft model"),
        tip=tr_later(
            "A smaller model that drafts tokens and has the same vocabulary, or the model's MTP "
            "block, which GPUs load only if it is chosen here"
        ),
    )  # fmt: skip

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each rank in the current mode; the shares sum to 1."""
        if self.mode == "single":
            return tuple(float(i == self.single) for i in range(len(self.ranks)))
        return tuple(rank.share for rank in self.ranks)

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active ranks, in the order in which the engine numbers its ranks."""
        if self.mode == "single":
            return (self.single,) if self.ranks else ()
        return tuple(i for i, rank in enumerate(self.ranks) if rank.is_on)

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of active ranks in each group, for mode "groups"."""
        sizes: list[int] = []
        for i in self.active:
            if sizes and self.ranks[i].joins:
                sizes[-1] += 1
            else:
                sizes.append(1)
        return tuple(sizes)

    @property
    def n_gpus(self) -> int:
        """Number of active GPUs."""
        return len({self.ranks[i].device for i in self.active if not self.ranks[i].is_cpu})

    @property
    def encoder_devices(self) -> tuple[str, ...]:
        """Devices that can run the vision encoder: this machine's active GPUs and its CPU."""
        own = [self.ranks[i].device for i in self.active if not machine_of(self.ranks[i].device)]
        return (*dict.fromkeys(device for device in own if not is_cpu(device)), "cpu")

    @property
    def encoder_device(self) -> str:
        """The vision encoder's device; "auto" if the chosen device is not active."""
        return self.mmproj_device if self.mmproj_device in self.encoder_devices else "auto"

    @property
    def n_cpu_ranks(self) -> int:
        """Number of ranks on the CPU, on or off."""
        return sum(rank.device == "cpu" for rank in self.ranks)

    def can_move(self, handle: int) -> bool:
        """Return whether the ranks on both sides of a boundary are unlocked (see `boundary`)."""
        return not any(self.ranks[i].is_locked for i in self.active[handle : handle + 2])

    def reserved(self, device: str) -> int:
        """Return the number of bytes to keep free on a device."""
        return dict(self.reserve).get(device, 0)

    def boundary(self, handle: int) -> float:
        """Return the position, 0 to 1, of the boundary after the active rank at index `handle`."""
        return math.fsum(self.shares[i] for i in self.active[: handle + 1])

    def load_params(self, path: str) -> LoadParams:
        """Return the load parameters for these settings.

        Raises:
            EngineError: there are no devices.
        """
        return LoadParams(
            path=path,
            devices=tuple(self.ranks[i].device for i in self.active),
            split=tuple(self.shares[i] for i in self.active) if len(self.active) > 1 else None,
            split_mode="tensor" if self.mode == "single" else self.mode,
            groups=self.groups if self.mode == "groups" else None,
            draft=(self.draft_path or "auto") if self.n_draft else "off",
            draft_max=max(1, self.n_draft),
            **self.values()
            | {
                "draft_vocab": self.draft_vocab if self.n_draft else 0,
                "mmproj_device": self.encoder_device,
            },
        )

    def values(self) -> dict[str, Any]:
        """Return the settings that are also load parameters, by name."""
        return {name: getattr(self, name) for name in SHARED_LOAD_OPTIONS}

    # changes

    def for_another_model(self, n_ctx: int | None) -> SplitSettings:
        """Set the context length and reset settings that are specific to the current model."""
        own = {n: LOAD_DEFAULTS[n] for n, one in SHARED_LOAD_OPTIONS.items() if one.of_model}
        mmproj = self.mmproj if self.mmproj in MMPROJ_KINDS else "auto"
        return replace(self, n_ctx=n_ctx, draft_path="", draft_vocab=0, mmproj=mmproj, **own)

    def with_mode(self, mode: Mode) -> SplitSettings:
        """Change how the model is split."""
        return replace(self, mode=mode)

    def with_chosen_mode(self, mode: Mode) -> SplitSettings:
        """Change the mode; if it splits the model, make sure that at least two ranks are active.

        If too few are, activate all GPUs, else all devices, else two ranks on the CPU.
        """
        changed = self.with_mode(mode)
        gpus = [i for i, rank in enumerate(self.ranks) if not rank.is_cpu]
        for candidates in (gpus, range(len(self.ranks))):
            if mode == "single" or len(changed.active) > 1:
                return changed
            for index in candidates:
                changed = changed.with_rank_on(index, True)
        return changed if len(changed.active) > 1 else changed.with_cpu_ranks(2)

    def with_share(self, index: int, share: float) -> SplitSettings:
        """Set one rank's share; the other unlocked ranks keep their proportions."""
        if self.mode == "single" or index not in self.active or self.ranks[index].is_locked:
            return self
        others = [i for i in self.active if i != index and not self.ranks[i].is_locked]
        if not others:
            return self
        room = math.fsum(self.ranks[i].share for i in (index, *others))
        share = min(room, max(0.0, share))
        weights = normalised([self.ranks[i].share for i in others])
        shares = {index: share} | {
            i: (room - share) * weight for i, weight in zip(others, weights, strict=True)
        }
        return self._with_shares(shares)

    def with_boundary(self, handle: int, position: float) -> SplitSettings:
        """Move the boundary between two ranks; all other ranks keep their shares."""
        active = self.active
        is_handle = self.mode != "single" and 0 <= handle < len(active) - 1
        if not is_handle or not self.can_move(handle):
            return self
        left, right = active[handle], active[handle + 1]
        start = self.boundary(handle - 1) if handle else 0.0
        both = self.ranks[left].share + self.ranks[right].share
        share = min(both, max(0.0, position - start))
        return self._with_shares({left: share, right: both - share})

    def with_split(self, split: Sequence[float]) -> SplitSettings:
        """Set the relative shares of all active ranks, locked or not."""
        shares = normalised(split)
        return self._with_shares(dict(zip(self.active, shares, strict=True)))

    def with_weights(self, weights: Sequence[float]) -> SplitSettings:
        """Set shares proportional to `weights`, one per rank; skip inactive and locked ranks."""
        if all(rank.is_locked for rank in self.ranks if rank.is_on):
            return self
        return self._rescaled(weights)

    def with_rank_on(self, index: int, is_on: bool) -> SplitSettings:
        """Switch a rank on or off; in mode "single", a rank switched on replaces the active one.

        In other modes, it takes an even share from the others. The last active rank stays on.
        """
        if self.mode == "single":
            return replace(self, single=index) if is_on else self
        on = [i for i in self.active if i != index]
        if self.ranks[index].is_on == is_on or not on:
            return self
        changed = self._with_rank(index, is_on=is_on, share=0.0, is_locked=False)
        if is_on:
            return changed.with_share(index, 1.0 / (len(on) + 1))
        return changed.renormalised()

    def with_locked(self, index: int, is_locked: bool) -> SplitSettings:
        """Lock or unlock the share of a rank that is on."""
        if not self.ranks[index].is_on:
            return self
        return self._with_rank(index, is_locked=is_locked)

    def with_joined(self, index: int, joins: bool) -> SplitSettings:
        """Put a rank into the previous rank's group, or let it start a new group."""
        return self._with_rank(index, joins=joins)

    def with_rank_moved(self, index: int, steps: int) -> SplitSettings:
        """Move a rank down by `steps`; group sizes do not change."""
        target = min(len(self.ranks) - 1, max(0, index + steps))
        order = [i for i in range(len(self.ranks)) if i != index]
        order.insert(target, index)
        ranks = tuple(
            replace(self.ranks[i], joins=place.joins)
            for i, place in zip(order, self.ranks, strict=True)
        )
        return replace(self, ranks=ranks, single=order.index(self.single))

    def with_reserve(self, device: str, n_bytes: int) -> SplitSettings:
        """Keep `n_bytes` free on a device."""
        others = [entry for entry in self.reserve if entry[0] != device]
        added = [(device, n_bytes)] if n_bytes > 0 else []
        return replace(self, reserve=tuple(sorted(others + added)))

    def with_cpu_ranks(self, count: int) -> SplitSettings:
        """Set the number of CPU ranks by adding or removing ranks at the end.

        Adding a rank in mode "single" changes the mode to "tensor".
        """
        count = min(MAX_CPU_RANKS, max(1, count))
        cpu = [i for i, rank in enumerate(self.ranks) if rank.device == "cpu"]
        if not cpu or count == len(cpu):
            return self
        if count < len(cpu):
            ranks = tuple(rank for i, rank in enumerate(self.ranks) if i not in cpu[count:])
            single = min(self.single, len(ranks) - 1)
            return replace(self, ranks=ensure_on(ranks), single=single).renormalised()
        changed = self if self.mode != "single" else self.with_mode("tensor")
        for _ in range(count - len(cpu)):
            last = changed.ranks[cpu[0]]
            joins = not changed.ranks[-1].joins
            added = RankSettings(last.device, last.key, is_on=False, share=0.0, joins=joins)
            changed = replace(changed, ranks=(*changed.ranks, added))
            changed = changed.with_rank_on(len(changed.ranks) - 1, True)
        return changed

    def _with_shares(self, shares: Mapping[int, float]) -> SplitSettings:
        ranks = tuple(replace(r, share=shares.get(i, r.share)) for i, r in enumerate(self.ranks))
        return replace(self, ranks=ranks)

    def _with_rank(self, index: int, **changes: Any) -> SplitSettings:
        ranks = list(self.ranks)
        ranks[index] = replace(ranks[index], **changes)
        return replace(self, ranks=tuple(ranks))

    def renormalised(self) -> SplitSettings:
        """Scale the shares to sum to 1."""
        return self._rescaled([rank.share for rank in self.ranks])

    def _rescaled(self, weights: Sequence[float]) -> SplitSettings:
        """Distribute what locked ranks leave, or the whole model if they leave nothing."""
        on = [i for i, rank in enumerate(self.ranks) if rank.is_on]
        movable = [i for i in on if not self.ranks[i].is_locked]
        room = 1.0 - math.fsum(self.ranks[i].share for i in on if i not in movable)
        if not movable or room < 0.0:
            movable, room = on, 1.0
        shares = normalised([weights[i] for i in movable])
        return self._with_shares({i: room * s for i, s in zip(movable, shares, strict=True)})


WINDOW_OPTIONS: Mapping[str, LoadOption] = {
    spec.name: spec.metadata["option"] for spec in fields(SplitSettings) if spec.metadata
}
"""All settings other than the split, by field name."""


def default_settings(devices: Sequence[DeviceInfo]) -> SplitSettings:
    """Return a split over all usable GPUs by memory size, or over the CPU if there are no GPUs.

    If there are several machines, each holds whole blocks.
    """
    usable = [device for device in devices if device.usable]
    with_gpus = {machine_of(device.id) for device in usable if device.kind == "cuda"}
    ranks = tuple(
        RankSettings(
            device.id, device.uuid or device.id,
            device.kind == "cuda" or machine_of(device.id) not in with_gpus, 0.0,
        )
        for device in usable
    )  # fmt: skip
    ranks = _with_groups(ranks)
    n_on = sum(rank.is_on for rank in ranks)
    is_far = any(machine_of(rank.device) for rank in ranks)
    several: Mode = "groups" if is_far else "tensor"
    first = SplitSettings(ranks=ranks, mode=several if n_on > 1 else "single")
    return first.with_weights([device.total_bytes for device in usable]) if ranks else first


def _with_groups(ranks: tuple[RankSettings, ...]) -> tuple[RankSettings, ...]:
    on = tuple(rank.device for rank in ranks if rank.is_on)
    sizes = LoadParams("", on, split_mode="groups").group_sizes if on else ()
    joins = iter([i > 0 for size in sizes for i in range(size)])
    return tuple(replace(rank, joins=rank.is_on and next(joins)) for rank in ranks)


def ensure_on(ranks: tuple[RankSettings, ...]) -> tuple[RankSettings, ...]:
    """Switch on the first rank if all are off."""
    if not ranks or any(rank.is_on for rank in ranks):
        return ranks
    return (replace(ranks[0], is_on=True), *ranks[1:])


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights scaled to sum to 1, or equal weights if all are 0."""
    total = math.fsum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * len(weights) if weights else []
    return [weight / total for weight in weights]


def is_same_load(first: LoadParams, second: LoadParams, n_ctx_train: int) -> bool:
    """Return whether both load the same model in the same way, up to rounding of the shares."""
    return _load_key(first, n_ctx_train) == _load_key(second, n_ctx_train)


def resplit_params(wanted: LoadParams, loaded: LoadParams, n_ctx_train: int) -> LoadParams | None:
    """Return the parameters to resplit a loaded model live, or None if a reload is required."""
    if wanted.context_for(n_ctx_train) != loaded.context_for(n_ctx_train):
        return None
    if any(getattr(wanted, name) != getattr(loaded, name) for name in NEEDING_A_LOAD):
        return None
    if _drafter(wanted) != _drafter(loaded):
        return None
    if set(map(machine_of, wanted.all_devices)) != set(map(machine_of, loaded.all_devices)):
        return None  # processes on other machines would have to be started or stopped
    return replace(
        wanted,
        n_ctx=loaded.n_ctx,
        control_vectors=loaded.control_vectors,
        control_layers=loaded.control_layers,
    )


def _load_key(params: LoadParams, n_ctx_train: int) -> tuple[object, ...]:
    n_ranks, n_gpus = len(params.devices), sum(not is_cpu(d) for d in set(params.all_devices))
    shares = normalised(params.split or [1.0] * n_ranks)
    return (
        params.path,
        params.devices,
        params.split_mode if n_ranks > 1 else "",
        params.group_sizes if n_ranks > 1 else (),
        tuple(round(share, 6) for share in shares),
        params.context_for(n_ctx_train),
        tuple(getattr(params, name) for name in SHARED_LOAD_OPTIONS if name not in SPECIAL),
        params.n_draft,
        _drafter(params),
        params.mmproj_device if params.mmproj != "off" else "",
        params.p2p if n_gpus > 1 else "",
    )


SPECIAL = ("n_ctx", "mmproj_device", "p2p")  # settings that `_load_key` handles separately

NEEDING_A_LOAD = (
    "path", "n_draft", "mmproj_device",
    *(name for name, one in SHARED_LOAD_OPTIONS.items() if one.is_kept and name != "n_ctx"),
)  # fmt: skip
"""Settings that require a reload to change."""


def _drafter(params: LoadParams) -> str:
    """Return the equivalent `SplitSettings.draft_path`."""
    return OWN_BLOCK if params.draft == OWN_BLOCK else params.draft_path


def settings_for(settings: SplitSettings, params: LoadParams) -> SplitSettings:
    """Return settings that load `params` on those of its devices that exist; no share is locked.

    The active ranks are ordered as in `params`, within the same set of indices.
    """
    settings = settings.with_cpu_ranks(max(1, params.devices.count("cpu")))
    places: list[int] = []
    for device in params.devices:
        free = (i for i in range(len(settings.ranks)) if i not in places)
        found = next((i for i in free if settings.ranks[i].device == device), None)
        if found is not None:
            places.append(found)
    if not places:
        return settings
    is_whole = len(places) == len(params.devices)
    shares = normalised((is_whole and params.split) or [1.0] * len(places))
    starts = {sum(params.group_sizes[:n]) for n in range(len(params.group_sizes))}
    ranks = [replace(rank, is_on=False, share=0.0, is_locked=False) for rank in settings.ranks]
    for number, (target, source) in enumerate(zip(sorted(places), places, strict=True)):
        old = settings.ranks[source]
        joins = number not in starts if starts and is_whole else settings.ranks[target].joins
        ranks[target] = RankSettings(old.device, old.key, True, shares[number], joins=joins)
    mode: Mode = "single"
    if len(places) > 1:
        mode = next((m for m in MODES if m == params.split_mode), "tensor")
    return replace(
        settings,
        ranks=tuple(ranks),
        mode=mode,
        single=min(places),
        n_draft=params.n_draft,
        draft_path=_drafter(params),
        **{name: getattr(params, name) for name in SHARED_LOAD_OPTIONS}
        | {"reserve": tuple(sorted(params.reserve))},
    )
