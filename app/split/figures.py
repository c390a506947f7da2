"""What the split panel shows: figures per rank, worked out without widgets.

Memory is told per physical device. Ranks on the same device share it, so the free memory of one
row already leaves out what all rows of that device take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from app.split.settings import SplitSettings
from app.units import percent_text, size_text
from engine import DeviceInfo, DevicePlan, DeviceSnapshot, MemoryUse, ModelLoaded, Plan

BRANDS = ("NVIDIA ", "GeForce ", "AMD ", "Intel(R) ", "(R)", "(TM)", " Processor")
"""Parts of device names that tell a person nothing new."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One rank as its row shows it; sizes in bytes.

    Attributes:
        index: of the rank in the settings.
        colour: index of its colour; that of the device, and the following for its virtual ranks.
        effective: the share that the plan reaches; None without a plan.
        siblings: (colour, bytes) of the other ranks on the same device.
        overhead: what using the device takes by itself, once for all of its ranks.
        guests: keys and values of GPUs that lie in this device's memory, the host's.
        outside: what is not the model's: other programs, the system, this window.
        reserve: what has to stay free.
        free: what stays beside all of that; negative when it does not fit.
        is_taker: it has no share, but takes what was moved there.
    """

    index: int
    colour: int
    label: str
    name: str
    is_on: bool
    asked: float
    effective: float | None
    total: int
    memory: MemoryUse
    siblings: tuple[tuple[int, int], ...]
    outside: int
    free: int
    sensors: str = ""
    overhead: int = 0
    guests: int = 0
    reserve: int = 0
    is_locked: bool = False
    is_taker: bool = False

    @property
    def taken(self) -> int:
        """All bytes of the model on the device, those of other ranks included."""
        others = sum(size for _, size in self.siblings)
        return self.memory.total + others + self.overhead + self.guests

    @property
    def share(self) -> float:
        """What is drawn: the reachable share where it is known."""
        return self.asked if self.effective is None else self.effective

    @property
    def spoken(self) -> str:
        """The row in one sentence, for a screen reader."""
        used = size_text(self.memory.total).replace("GiB", "gibibytes").replace("MiB", "mebibytes")
        total = size_text(self.total).replace("GiB", "gibibytes").replace("MiB", "mebibytes")
        return f"{self.label}, {self.share:.0%}, {used} of {total}".replace("%", " percent")


@dataclass(frozen=True, slots=True)
class FigureInputs:
    """Everything that the figures follow from, apart from the settings.

    Attributes:
        outside: bytes per device id that the model does not account for.
        by_rank: the plan's rows by index of the rank in the settings.
        overhead: bytes per device id that using it takes by itself.
        slots: of GPUs, such as "PCIe 4 ×16", by device id.
    """

    devices: Mapping[str, DeviceInfo]
    snapshots: Mapping[str, DeviceSnapshot] = field(default_factory=dict)
    outside: Mapping[str, int] = field(default_factory=dict)
    by_rank: Mapping[int, DevicePlan] = field(default_factory=dict)
    overhead: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)


def plan_by_rank(settings: SplitSettings, plan: Plan | None) -> dict[int, DevicePlan]:
    """The plan's rows at their index in the settings.

    A plan counts only ranks that take part, and behind them devices that take what is moved there;
    such a one gets the first place of its device.
    """
    if plan is None:
        return {}
    found = dict(zip(settings.active, plan.devices, strict=False))
    for taker in plan.devices[len(settings.active) :]:
        places = (i for i, r in enumerate(settings.ranks) if r.device == taker.device)
        place = next((i for i in places if i not in found), None)
        if place is not None:
            found[place] = taker
    return found


def row_figures(settings: SplitSettings, inputs: FigureInputs) -> list[RowFigures]:
    """One entry per rank that is shown: all, or one per device in the mode "single"."""
    labels = rank_labels([rank.device for rank in settings.ranks])
    shown = range(len(settings.ranks))
    if settings.mode == "single" and settings.ranks:
        first = {rank.device: i for i, rank in reversed(list(enumerate(settings.ranks)))}
        first[settings.ranks[settings.single].device] = settings.single
        shown_set = set(first.values())
        return [_row(settings, inputs, i, labels[i]) for i in shown if i in shown_set]
    return [_row(settings, inputs, i, labels[i]) for i in shown]


def _row(settings: SplitSettings, inputs: FigureInputs, index: int, label: str) -> RowFigures:
    rank = settings.ranks[index]
    device = inputs.devices[rank.device]
    planned = inputs.by_rank.get(index)
    memory = planned.memory if planned else MemoryUse()
    siblings = tuple(
        (rank_colour(settings, inputs, i), other.memory.total)
        for i, other in inputs.by_rank.items()
        if i != index and settings.ranks[i].device == rank.device
    )
    outside = inputs.outside.get(rank.device, device.total_bytes - device.free_bytes)
    is_first = index == min(i for i, r in enumerate(settings.ranks) if r.device == rank.device)
    guests = 0
    if rank.device == "cpu":
        guests = sum(other.memory.host_kv for other in inputs.by_rank.values())
    reserve = settings.reserved(rank.device)
    overhead = inputs.overhead.get(rank.device, 0)
    slot = inputs.slots.get(rank.device, "")
    is_on = index in settings.active
    figures = RowFigures(
        index=index,
        colour=rank_colour(settings, inputs, index),
        label=label,
        name=short_name(device.name),
        is_on=is_on,
        asked=settings.shares[index],
        effective=planned.effective if planned else None,
        total=device.total_bytes,
        memory=memory,
        siblings=siblings,
        outside=outside,
        free=0,
        sensors=sensors_text(inputs.snapshots.get(rank.device), slot),
        overhead=overhead,
        guests=guests,
        reserve=reserve,
        is_locked=rank.is_locked,
        is_taker=not is_on and (planned is not None or (is_first and guests > 0)),
    )
    return replace(figures, free=device.total_bytes - outside - figures.taken - reserve)


def rank_colour(settings: SplitSettings, inputs: FigureInputs, index: int) -> int:
    """The place of the device among all devices, as in the monitor, plus its number there.

    The CPU is the last device, so its virtual ranks get colours that no device has.
    """
    device = settings.ranks[index].device
    earlier = sum(rank.device == device for rank in settings.ranks[:index])
    return list(inputs.devices).index(device) + earlier


def rank_labels(devices: Sequence[str]) -> list[str]:
    """ "GPU 0" after CUDA's number, "CPU 0" counted; for the device ids of ranks."""
    labels, n_cpu = [], 0
    for device in devices:
        if device == "cpu":
            labels.append(f"CPU {n_cpu}")
            n_cpu += 1
        else:
            labels.append(f"GPU {device.partition(':')[2]}")
    return labels


def short_name(name: str) -> str:
    """A device's name without what every such name contains."""
    for brand in BRANDS:
        name = name.replace(brand, "")
    return name.strip()


def sensors_text(snapshot: DeviceSnapshot | None, slot: str = "") -> str:
    """Slot, temperature and power where the device tells them: "PCIe 4 ×16 · 62 °C · 310 W"."""
    parts = [slot] if slot else []
    if snapshot is None:
        return slot
    if snapshot.temperature_c is not None:
        parts.append(f"{snapshot.temperature_c:.0f} °C")
    if snapshot.power_w is not None:
        parts.append(f"{snapshot.power_w:.0f} W")
    return " · ".join(parts)


def outside_bytes(
    snapshots: Sequence[DeviceSnapshot],
    loaded: ModelLoaded | None,
    overhead: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Memory in use per device, less what the loaded model holds there.

    That part is given back before another split is loaded, or counted once more, so it counts as
    free.

    Args:
        overhead: bytes per device id that using it takes by itself, where the model does.
    """
    model = dict(overhead) if loaded else {}
    for entry in loaded.memory if loaded else ():
        model[entry.device] = model.get(entry.device, 0) + entry.measured.total
    return {
        s.device: max(0, s.used_bytes - model.get(s.device, 0)) for s in snapshots if s.total_bytes
    }


def shortages(rows: Sequence[RowFigures]) -> list[str]:
    """A sentence per device on which the plan does not fit."""
    sentences: dict[str, str] = {}
    for row in rows:
        needed = row.taken
        if row.free >= 0 or not (row.memory.total or row.guests):
            continue
        device = "The CPU" if row.label.startswith("CPU") else row.label
        kept = f" beside {size_text(row.reserve)} in reserve" if row.reserve else ""
        sentences[device] = (
            f"{device} would need {size_text(needed)} but {size_text(max(0, row.free + needed))} "
            f"can be had{kept}: {size_text(-row.free)} short."
        )
    return list(sentences.values())


def share_text(row: RowFigures) -> str:
    """ "asked 45.8 · possible 45.8", or only what was asked without a plan."""
    if row.is_taker and row.effective is not None:
        return f"takes {percent_text(row.effective)}"
    if not row.is_on:
        return ""
    asked = f"asked {percent_text(row.asked)}"
    return asked if row.effective is None else f"{asked} · possible {percent_text(row.effective)}"


def kinds_of(row: RowFigures) -> list[tuple[str, int]]:
    """What the row's memory is used for: name and bytes; what is 0 is left out."""
    memory = row.memory
    kinds = [
        ("weights", memory.weights),
        ("KV cache", memory.kv),
        ("compute", memory.compute),
        ("overhead", row.overhead),
        ("KV of GPUs", row.guests),
    ]
    return [(name, size) for name, size in kinds if size]
