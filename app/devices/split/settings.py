"""Settings of the split: an immutable value, without widgets.

Every change returns a new `SplitSettings` in which the shares of the ranks that are on sum to 1
and those of ranks that are off are 0. A locked rank keeps its share while others change theirs.
Each rank names its physical device; the CPU can have several ranks.
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
"""End of the names of models' files."""

OWN_BLOCK = "mtp"
"""Value of `SplitSettings.draft_path` for the model's own block for guesses."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of one rank.

    Attributes:
        device: device id such as "cuda:0"; repeated for virtual ranks of one device.
        key: name of the device that outlasts a restart: its UUID, or else its id.
        is_on: whether the rank takes part.
        share: share of the model, 0 to 1; 0 while the rank is off.
        is_locked: whether the share stays while others change.
        joins: whether the rank is in the group of the one before it, in mode "groups".
    """

    device: str
    key: str
    is_on: bool
    share: float
    is_locked: bool = False
    joins: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether the rank is on the CPU of any machine."""
        return is_cpu(self.device)


@dataclass(frozen=True, slots=True)
class SplitSettings(LoadOptions):
    """The split and everything else that decides where the bytes go.

    Attributes:
        ranks: all ranks, in order, whether on or off.
        mode: how the model is split; "single" is one device.
        single: index of the rank that takes everything in mode "single"; the ranks keep their
            shares for the other modes.
        n_draft: largest number of guesses of the next tokens that are checked at once; 0 for none.
        draft_path: file of the draft model, "mtp" to load the model's own block for guesses on any
            device, "" for neither; specific to one model.
    """

    ranks: tuple[RankSettings, ...] = ()
    mode: Mode = "single"
    single: int = 0
    n_draft: int = load_option(
        DEFAULT_DRAFTED, kind=int, low=0, high=MAX_DRAFTED, place="rare",
        title=tr_later("Guessed tokens"),
        tip=tr_later(
            "How many tokens are guessed and checked at once: from the text so far, and by "
            "the model's own block for that (MTP) if its file has one. Answers stay the "
            "same, and text that repeats comes faster. 0 guesses none"
        ),
    )  # fmt: skip
    draft_path: str = load_option(
        "", place="rare", title=tr_later("Draft model"),
        tip=tr_later(
            "A smaller model with the same vocabulary, which guesses tokens; or the "
            "model's own block for that, which GPUs load only if it is chosen here"
        ),
    )  # fmt: skip

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of every rank in the present mode; they sum to 1."""
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
    def groups(self) -> tuple[int, ...]:
        """Sizes of the groups of active ranks in the mode "groups"."""
        sizes: list[int] = []
        for i in self.active:
            if sizes and self.ranks[i].joins:
                sizes[-1] += 1
            else:
                sizes.append(1)
        return tuple(sizes)

    @property
    def n_gpus(self) -> int:
        """Number of different GPUs that take part."""
        return len({self.ranks[i].device for i in self.active if not self.ranks[i].is_cpu})

    @property
    def encoder_devices(self) -> tuple[str, ...]:
        """Devices that can encode pictures: GPUs of this machine that take part, and the CPU."""
        own = [self.ranks[i].device for i in self.active if not machine_of(self.ranks[i].device)]
        return (*dict.fromkeys(device for device in own if not is_cpu(device)), "cpu")

    @property
    def encoder_device(self) -> str:
        """The chosen device for pictures; "auto" where it does not take part."""
        return self.mmproj_device if self.mmproj_device in self.encoder_devices else "auto"

    @property
    def n_cpu_ranks(self) -> int:
        """Number of ranks on the CPU, on or off."""
        return sum(rank.device == "cpu" for rank in self.ranks)

    def can_move(self, handle: int) -> bool:
        """Return whether neither neighbour of the boundary after active rank `handle` is locked."""
        return not any(self.ranks[i].is_locked for i in self.active[handle : handle + 2])

    def reserved(self, device: str) -> int:
        """Return the bytes to keep free on a device."""
        return dict(self.reserve).get(device, 0)

    def boundary(self, handle: int) -> float:
        """Return where active rank number `handle` ends and the next begins, 0 to 1."""
        return math.fsum(self.shares[i] for i in self.active[: handle + 1])

    def load_params(self, path: str) -> LoadParams:
        """Return the parameters of a load with these settings.

        Raises:
            EngineError: there is no device.
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
        """Return the settings that a load has in the same form."""
        return {name: getattr(self, name) for name in SHARED_LOAD_OPTIONS}

    # changes

    def for_another_model(self, n_ctx: int | None) -> SplitSettings:
        """Set the context, and leave out what names blocks and tensors of the present model."""
        own = {n: LOAD_DEFAULTS[n] for n, one in SHARED_LOAD_OPTIONS.items() if one.of_model}
        mmproj = self.mmproj if self.mmproj in MMPROJ_KINDS else "auto"
        return replace(self, n_ctx=n_ctx, draft_path="", draft_vocab=0, mmproj=mmproj, **own)

    def with_mode(self, mode: Mode) -> SplitSettings:
        """Change how the model is split."""
        return replace(self, mode=mode)

    def with_chosen_mode(self, mode: Mode) -> SplitSettings:
        """Change how the model is split, so that there is something to split between.

        Where one rank alone would take part, all GPUs do, or else all devices, or two ranks on the
        CPU.
        """
        changed = self.with_mode(mode)
        gpus = [i for i, rank in enumerate(self.ranks) if not rank.is_cpu]
        for wanted in (gpus, range(len(self.ranks))):
            if mode == "single" or len(changed.active) > 1:
                return changed
            for index in wanted:
                changed = changed.with_rank_on(index, True)
        return changed if len(changed.active) > 1 else changed.with_cpu_ranks(2)

    def with_share(self, index: int, share: float) -> SplitSettings:
        """Give one rank `share`; the other ranks that are not locked keep their proportions."""
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
        """Move the boundary between two neighbours; all other ranks keep their shares."""
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
        """Share out in proportion to one weight per rank; ranks that are off or locked stay."""
        if all(rank.is_locked for rank in self.ranks if rank.is_on):
            return self
        return self._rescaled(weights)

    def with_rank_on(self, index: int, is_on: bool) -> SplitSettings:
        """Switch a rank on or off; in mode "single" the one switched on takes all.

        A rank that is switched on takes an even share from the others. The last one stays on.
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
        """Put a rank into the group of the one before it, or let it begin a group."""
        return self._with_rank(index, joins=joins)

    def with_rank_moved(self, index: int, steps: int) -> SplitSettings:
        """Move a rank down by `steps` places; groups still begin at the same places."""
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
        """Set the number of ranks on the CPU, by adding or removing at the end.

        Adding a rank leaves mode "single", as the person wants a split.
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
        """Share out by weight what locked ranks leave; where they leave nothing, everything."""
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
"""All settings beside the split, by the name of their field."""


def default_settings(devices: Sequence[DeviceInfo]) -> SplitSettings:
    """Return a split over all usable GPUs by memory size, or the CPU where there are none.

    Each of several machines has whole blocks.
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
    """Put the ranks that are on into the engine's default groups; the others are alone."""
    on = tuple(rank.device for rank in ranks if rank.is_on)
    sizes = LoadParams("", on, split_mode="groups").group_sizes if on else ()
    joins = iter([i > 0 for size in sizes for i in range(size)])
    return tuple(replace(rank, joins=rank.is_on and next(joins)) for rank in ranks)


def ensure_on(ranks: tuple[RankSettings, ...]) -> tuple[RankSettings, ...]:
    """Switch the first rank on if none is."""
    if not ranks or any(rank.is_on for rank in ranks):
        return ranks
    return (replace(ranks[0], is_on=True), *ranks[1:])


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights scaled to sum to 1; equal ones where all are 0."""
    total = math.fsum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * len(weights) if weights else []
    return [weight / total for weight in weights]
