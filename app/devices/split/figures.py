"""Figures per rank for the split panel, computed without widgets.

Ranks on the same device share its memory, so what all of them use is subtracted from the free
memory in each of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import percent_text, size_text, spoken_size
from app.devices.split.settings import SplitSettings
from engine import DeviceInfo, DeviceSnapshot, MemoryUse, ModelLoaded

if TYPE_CHECKING:
    from engine import DevicePlan, Evaluation, Forecast, Plan, Remedy

BRANDS = ("NVIDIA ", "GeForce ", "AMD ", "Intel(R) ", "(R)", "(TM)", " Processor")
"""Parts of device names that short names omit."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """Figures in one rank's row; sizes are in bytes.

    Attributes:
        index: the rank's index in the settings.
        colour: index of the device colour; virtual ranks on a device have consecutive indices.
        label: name of the rank, for example "GPU 0".
        name: name of the device without the brand.
        requested: share in the settings, 0 to 1.
        effective: share in the plan, 0 to 1; None if there is no plan.
        blocks: indices of the rank's blocks, in modes that distribute whole blocks.
        of_weights: fraction of all weight bytes that is on the rank, 0 to 1.
        total: the device's memory.
        memory: planned memory for this rank, by kind.
        siblings: (colour, bytes) for each other rank on the same device.
        outside: memory used by other programs, the system and this window.
        free: memory that is left; negative if the model does not fit.
        sensors: slot, temperature and power.
        overhead: fixed memory cost of using the device, counted once for all its ranks.
        guests: the GPUs' KV cache kept in this device's memory (host memory only).
        kept: state checkpoints of recurrent layers (host memory only).
        apart: memory for encoding images if no rank is on the device (host memory only).
        reserve: memory to keep free.
        is_taker: whether the rank has no share and holds only tensors moved to it.
        note: caveat about the device, for example that it is untested, or "".
    """

    index: int
    colour: int
    label: str
    name: str
    is_on: bool
    requested: float
    effective: float | None
    total: int
    memory: MemoryUse
    siblings: tuple[tuple[int, int], ...]
    outside: int
    free: int
    blocks: tuple[int, ...] = ()
    of_weights: float = 0.0
    sensors: str = ""
    overhead: int = 0
    guests: int = 0
    kept: int = 0
    apart: int = 0
    reserve: int = 0
    is_locked: bool = False
    is_taker: bool = False
    note: str = ""

    @property
    def taken(self) -> int:
        """Bytes that the model takes on the device, including its other ranks."""
        others = sum(size for _, size in self.siblings)
        return self.memory.total + others + self.overhead + self.visiting

    @property
    def visiting(self) -> int:
        """Bytes in host memory that belong to no CPU rank."""
        return self.guests + self.kept + self.apart

    @property
    def share(self) -> float:
        """Share to draw, 0 to 1: the effective share if known, else the requested share."""
        return self.requested if self.effective is None else self.effective

    @property
    def spoken(self) -> str:
        """The row as a sentence for screen readers."""
        used, total = spoken_size(self.memory.total), spoken_size(self.total)
        text = tr("{device}, {share} percent, {used} of {total}")
        share = f"{100 * self.share:.0f}"
        return text.format(device=self.label, share=share, used=used, total=total)


@dataclass(frozen=True, slots=True)
class FigureInputs:
    """Inputs to the figures, in addition to the settings; see `RowFigures`.

    Mappings are keyed by device id, except that `by_rank` is keyed by rank index in the settings
    and `blocks` by rank index in the plan.

    Attributes:
        devices: all devices, in the order of their colours.
    """

    devices: Mapping[str, DeviceInfo]
    snapshots: Mapping[str, DeviceSnapshot] = field(default_factory=dict)
    outside: Mapping[str, int] = field(default_factory=dict)
    by_rank: Mapping[int, DevicePlan] = field(default_factory=dict)
    blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    overhead: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    kept: int = 0
    apart: int = 0


def plan_by_rank(settings: SplitSettings, plan: Plan | None) -> dict[int, DevicePlan]:
    """Return a plan's entries by rank index in the settings.

    A plan lists the active ranks, then devices that have no share but hold moved tensors. Each of
    these devices is assigned its first inactive rank.
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


def blocks_by_rank(
    settings: SplitSettings, evaluation: Evaluation | None
) -> dict[int, tuple[int, ...]]:
    """Return each rank's blocks in a plan, for modes that distribute whole blocks."""
    if evaluation is None or settings.mode not in ("layer", "groups"):
        return {}
    return {d.rank: evaluation.split.blocks_of(d.rank) for d in evaluation.plan.devices}


def row_figures(settings: SplitSettings, inputs: FigureInputs) -> list[RowFigures]:
    """Return figures for the visible ranks: all, or one per device in mode "single"."""
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
    apart = inputs.apart if rank.device == "cpu" else 0
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
        requested=settings.shares[index],
        effective=planned.effective if planned else None,
        blocks=inputs.blocks.get(planned.rank, ()) if planned else (),
        of_weights=_of_weights(inputs, planned),
        total=device.total_bytes,
        memory=memory,
        siblings=siblings,
        outside=outside,
        free=0,
        sensors=sensors_text(inputs.snapshots.get(rank.device), slot),
        overhead=overhead,
        guests=guests,
        kept=inputs.kept if rank.device == "cpu" else 0,
        apart=apart,
        reserve=reserve,
        is_locked=rank.is_locked,
        is_taker=not is_on and (planned is not None or (is_first and guests + apart > 0)),
        note=translated(device.note),
    )
    return replace(figures, free=device.total_bytes - outside - figures.taken - reserve)


def _of_weights(inputs: FigureInputs, planned: DevicePlan | None) -> float:
    total = sum(other.memory.weights for other in inputs.by_rank.values())
    return planned.memory.weights / total if planned is not None and total else 0.0


def rank_colour(settings: SplitSettings, inputs: FigureInputs, index: int) -> int:
    """Return a rank's colour: the index of its device plus its index on that device.

    The monitor uses the same colours. The CPU is the last device, so no other device uses the
    colours of its virtual ranks.
    """
    device = settings.ranks[index].device
    earlier = sum(rank.device == device for rank in settings.ranks[:index])
    return list(inputs.devices).index(device) + earlier


def rank_labels(devices: Sequence[str]) -> list[str]:
    """Return a label for each rank, given the ranks' device ids.

    GPUs have their CUDA index ("GPU 0"), and CPU ranks are numbered ("CPU 0"). Devices on other
    machines are prefixed with the machine's number, counted from 1: "2: GPU 0", "2: CPU".
    """
    labels, n_cpu = [], 0
    for device in devices:
        machine, _, own = device.rpartition("/")
        where = f"{int(machine) + 1}: " if machine else ""
        if device == "cpu":
            labels.append(f"CPU {n_cpu}")
            n_cpu += 1
        elif own == "cpu":
            labels.append(f"{where}CPU")
        else:
            labels.append(f"{where}GPU {own.partition(':')[2]}")
    return labels


def short_name(name: str) -> str:
    """Return a device's name without `BRANDS`."""
    for brand in BRANDS:
        name = name.replace(brand, "")
    return name.strip()


def sensors_text(snapshot: DeviceSnapshot | None, slot: str = "") -> str:
    """Return the known parts of "PCIe 4 ×16 · 62 °C · 310 W"."""
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
    """Return the bytes in use by device id, excluding the loaded model.

    The model's bytes are either freed before the next load or counted in the next plan.

    Args:
        overhead: fixed cost in bytes of using each of the model's devices.
    """
    model = dict(overhead) if loaded else {}
    for entry in loaded.memory if loaded else ():
        model[entry.device] = model.get(entry.device, 0) + entry.measured.total
    return {
        s.device: max(0, s.used_bytes - model.get(s.device, 0)) for s in snapshots if s.total_bytes
    }


def shortages(rows: Sequence[RowFigures]) -> list[str]:
    """Return a sentence for each device whose memory the plan exceeds."""
    sentences: dict[str, str] = {}
    for row in rows:
        needed = row.taken
        if row.free >= 0 or not (row.memory.total or row.guests or row.apart):
            continue
        device = "CPU" if row.label.startswith("CPU") else row.label
        left = row.free + needed
        if left > 0:
            text = tr("{device}: {needed} needed, {left} available, {short} short.")
            kept = tr(
                "{device}: {needed} needed, {left} available after keeping {kept} free, "
                "{short} short."
            )
        else:
            text = tr("{device}: {needed} needed, none available.")
            kept = tr("{device}: {needed} needed, none available after keeping {kept} free.")
        sizes = {"needed": needed, "left": left, "kept": row.reserve, "short": -row.free}
        words = {name: size_text(size) for name, size in sizes.items()}
        sentences[device] = (kept if row.reserve else text).format(device=device, **words)
    return list(sentences.values())


def share_text(row: RowFigures) -> str:
    """Return "target 45.8 · actual 46.9 %", or "blocks 0-11 · 31.6 % of bytes".

    If whole blocks are distributed, a rank's shares of blocks and of bytes differ.
    """
    if row.is_taker and row.effective is not None:
        return tr("actual {percent} %").format(percent=percent_text(row.effective))
    if not row.is_on:
        return ""
    if row.blocks:
        text = tr("{blocks} · {percent} % of bytes")
        of_weights = percent_text(row.of_weights)
        return text.format(blocks=blocks_text(row.blocks), percent=of_weights)
    requested = percent_text(row.requested)
    if row.effective is None:
        return tr("target {percent} %").format(percent=requested)
    text = tr("target {asked} · actual {percent} %")
    return text.format(asked=requested, percent=percent_text(row.effective))


def blocks_text(blocks: Sequence[int]) -> str:
    """Return sorted block indices as "blocks 0-11, 14"."""
    runs: list[tuple[int, int]] = []
    for number in blocks:
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    names = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
    return tr_n("block {names}", "blocks {names}", len(blocks), names=names)


def kinds_of(row: RowFigures) -> list[tuple[str, int]]:
    """Return the English name and the size in bytes of each kind of memory in use."""
    memory = row.memory
    kinds = [
        (tr_later("weights"), memory.weights),
        (tr_later("KV cache"), memory.kv),
        (tr_later("compute"), memory.compute),
        (tr_later("rounding"), memory.padding),
        (tr_later("draft model"), memory.draft),
        (tr_later("images"), memory.pictures + row.apart),
        (tr_later("overhead"), row.overhead),
        (tr_later("GPU KV cache"), row.guests),
        (tr_later("state checkpoints"), row.kept),
    ]
    return [(name, size) for name, size in kinds if size]


LoadState = Literal["empty", "ready", "loading", "loaded", "applying"]
"""State of the model in the engine; "applying" means that it is being split live."""


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """Predicted and measured speed of the split.

    Attributes:
        forecast: predicted speed; None if it cannot be predicted.
        n_past: tokens in the context for which decode speed is predicted.
        is_measured: whether the forecast is based on measurements of these devices.
        measured: speed of the last answer with this split, in tokens/s; 0 if there is none.
        expected: predicted speed of that answer times the gain from draft tokens; 0 if unknown.
    """

    forecast: Forecast | None = None
    n_past: int = 0
    is_measured: bool = False
    is_simulated: bool = False
    measured: float = 0.0
    expected: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative error of the prediction for the last answer; positive if too high."""
        if not self.measured or not self.expected:
            return None
        return self.expected / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class FitFigures:
    """The longest context that fits, and remedies if the settings do not fit.

    Attributes:
        n_ctx: longest context that fits, in tokens; None if unknown.
        remedies: changes that would make the settings fit.
        is_current: whether both apply to the current settings; if not, a search is running.
    """

    n_ctx: int | None = None
    remedies: Sequence[Remedy] = ()
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class SplitPicture:
    """Settings and their figures.

    Attributes:
        has_model: whether a model is selected, loaded or not.
        rows: figures for the visible ranks.
        colours: index of each rank's device colour.
        plan: bytes per device; None if planning failed.
        problems: why planning failed, or on which devices the plan does not fit.
        n_ctx: context length in effect, in tokens.
        measured: measured bytes by rank; empty if the loaded settings differ.
        can_load: whether a model is selected that these settings can load.
        has_changed: whether the settings differ from the loaded ones.
        can_apply: whether the loaded model can adopt the settings without a reload.
        elsewhere: name of the server that runs the model; "" for this machine.
        chosen_because: reason for the suggested settings; "" if the user chose them.
    """

    load_state: LoadState
    loaded: ModelLoaded | None
    has_model: bool
    settings: SplitSettings
    rows: tuple[RowFigures, ...]
    colours: tuple[int, ...]
    plan: Plan | None
    problems: tuple[str, ...]
    n_ctx: int
    measured: Mapping[int, int]
    can_load: bool
    has_changed: bool
    can_apply: bool
    can_undo: bool
    can_redo: bool
    speed: SpeedFigures = field(default_factory=SpeedFigures)
    fit: FitFigures = field(default_factory=FitFigures)
    chosen_because: str = ""
    elsewhere: str = ""

    @property
    def can_start(self) -> bool:
        """Whether these settings can be loaded or applied now."""
        if self.load_state == "loaded":
            return self.has_changed and self.can_load
        return self.load_state == "ready" and self.can_load


SEEN_BYTES = 64 << 20  # smallest visible change in memory; sizes show tenths of a GiB

SEEN_W = 5.0  # smallest visible change in a device's power, in watts


def readings_differ(old: DeviceSnapshot | None, new: DeviceSnapshot | None, part: float) -> bool:
    """Return whether readings differ visibly; `part` is the smallest visible fraction of memory."""
    if old is None or new is None:
        return True
    if (old.device, old.problem, old.total_bytes) != (new.device, new.problem, new.total_bytes):
        return True
    seen = max(SEEN_BYTES, part * new.total_bytes)
    return (
        abs(old.used_bytes - new.used_bytes) >= seen
        or abs(old.free_bytes - new.free_bytes) >= seen
        or _rounded(old.temperature_c, 1.0) != _rounded(new.temperature_c, 1.0)
        or _rounded(old.power_w, SEEN_W) != _rounded(new.power_w, SEEN_W)
    )


def _rounded(value: float | None, step: float) -> int | None:
    return None if value is None else round(value / step)
