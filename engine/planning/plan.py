"""Plans: predicted bytes per rank, from a model's header only, without torch or weights.

A plan walks the declarations that the loader later fills, so weight and KV cache bytes are exact,
except that F16 and BF16 on a CPU may take 0.8 % less than counted; see `word_bytes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import GIB, OutOfDeviceMemory, Sentence
from engine.formats.gguf.companions import Stamp, stamp_of
from engine.formats.gguf.reader import GGUFFile
from engine.hardware.backend_choice import uses_kernels
from engine.hardware.cuda_api import overhead_bytes
from engine.hardware.devices.types import CPU, far_id, is_cpu, machine_of
from engine.model.forward.batch import LARGE_PROMPT_BATCHES, PROMPT_BATCH
from engine.model.forward.pages import AttentionWindow, in_order
from engine.model.forward.state import CacheSize, KVState, RequestRoom, few_guessed
from engine.planning.draft import draft_bytes
from engine.planning.footprint import WorkingSizes, held_bytes
from engine.planning.memory import MemoryUse
from engine.planning.rank_size import RankSize, rank_memory, rank_size
from engine.vision.encoders.base import TextModel
from engine.vision.encoders.registry import (
    STORAGE,
    declare_vision_encoder,
    find_vision_encoder,
    work_bytes,
)

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.layers.hparams import HParams
    from engine.model.sharding.shares import Shares

MAX_KEPT = 8
"""Maximum number of files with cached sizes; a drag makes a plan per mouse move."""

PICTURES_HINT = Sentence(
    "Encode images on another device (--mmproj-device cpu), or load the model without the vision"
    " encoder (--mmproj off)."
)


def mmproj_path(params: LoadParams, text: TextModel) -> str:
    """Return the path of the mmproj file to load with a model; "" if there is none."""
    if params.mmproj == "off":
        return ""
    if params.mmproj != "auto":
        return params.mmproj
    folder = Path(params.path).parent
    return _mmproj_beside(params.path, text, stamp_of(folder))


@lru_cache(MAX_KEPT)
def _mmproj_beside(path: str, text: TextModel, stamp: Stamp) -> str:
    found = find_vision_encoder(Path(path), text)
    return "" if found is None else str(found)


def vision_bytes(params: LoadParams, text: TextModel) -> int:
    """Return the predicted bytes of a vision encoder and its working memory; 0 if there is none."""
    path = mmproj_path(params, text)
    return _bytes(path, text, stamp_of(Path(path))) if path else 0


@lru_cache(MAX_KEPT)
def _bytes(path: str, text: TextModel, stamp: Stamp) -> int:
    with GGUFFile.open(path) as file:
        declaration = declare_vision_encoder(file, text)
        held = sum(held_bytes(slot, 0, STORAGE) for slot in declaration.slots)
    return held + work_bytes(declaration.encoder)


DENSE_FRACTION = 0.8
"""Largest fraction of a device's free memory that dequantised weights may take; otherwise they stay
quantised."""

MAX_CHECKPOINT_BYTES, MAX_CHECKPOINTS = 4 << 30, 64
"""Default limits for state checkpoints in host memory: bytes, and number of sequence states (three
for each of about twenty chats)."""

CHECKPOINT_FRACTION = 1 / 8
"""Default limit as a fraction of the host's free memory; twice that fraction applies to the memory
that a plan leaves free."""

LARGE_FRACTION = 0.98
"""Largest fraction of a device's free memory that a plan may take if it has large prompt batches or
states for many draft tokens; otherwise both are smaller. The rest covers estimation errors."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One rank of a plan.

    Attributes:
        asked: requested share of the model, 0 to 1; all ranks' shares sum to 1.
        effective: actual share of the model's weight elements.
        memory: predicted bytes; weights and KV cache are exact, `compute` is an estimate.
        storage: format of the rank's matrices: "f32" (dequantised, fast), "packed" (as in the file,
            dequantised on each use; slow, but small) or "kernels" (repacked into planes for our
            kernels; as small as in the file, and fast).
    """

    rank: int
    device: str
    asked: float
    effective: float
    memory: MemoryUse
    storage: str = "f32"


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of one model over ranks.

    Attributes:
        devices: one entry per rank, in rank order.
        kv_type: KV type; see `LoadParams.kv_type`. A single type if values are part of the keys.
        file_bytes: bytes that all ranks together read from the file.
        reserve: pairs of a device and the number of bytes to keep free on it.
        parallel: number of full-length requests that fit in the KV cache.
        checkpoint_bytes: limit for state checkpoints in host memory.
        pictures_apart: bytes of the vision encoder and its work if it is on a CPU without ranks.
    """

    devices: tuple[DevicePlan, ...]
    split_mode: str
    n_ctx: int
    kv_type: str
    file_bytes: int
    warnings: tuple[str, ...] = ()
    reserve: tuple[tuple[str, int], ...] = ()
    n_batch: int = PROMPT_BATCH
    parallel: int = 1
    windows: tuple[AttentionWindow, ...] = ()
    has_states: bool = False
    checkpoint_bytes: int = 0
    n_guessed: int = 0
    pictures_device: str = ""
    pictures_apart: int = 0

    @property
    def cache_size(self) -> CacheSize:
        """Sizes that determine how much memory the cache takes."""
        return CacheSize(self.n_ctx, self.kv_type, self.parallel, self.n_batch, self.n_guessed)

    @property
    def rooms(self) -> tuple[RequestRoom, ...]:
        """Possible numbers of parallel requests and their lengths; see `CacheSize.rooms`."""
        return self.cache_size.rooms(self.windows, has_states=self.has_states)

    @property
    def storage(self) -> str:
        """Formats of the ranks' matrices, each listed once; see `DevicePlan.storage`."""
        return " + ".join(dict.fromkeys(d.storage for d in self.devices))

    @property
    def total_bytes(self) -> int:
        """Total predicted bytes over all devices."""
        return sum(self.bytes_by_device().values())

    @property
    def pictures(self) -> int:
        """Predicted bytes of the vision encoder and its working memory."""
        return self.pictures_apart + sum(device.memory.pictures for device in self.devices)

    def bytes_by_device(self) -> dict[str, int]:
        """Return the predicted bytes per physical device, summed over its ranks.

        A GPU's host memory and state checkpoints count for the machine's CPU; a GPU's overhead
        counts once.
        """
        total: dict[str, int] = defaultdict(int, self.overhead())
        for device in self.devices:
            total[device.device] += device.memory.total
            if device.memory.on_host:
                total[far_id(machine_of(device.device), CPU)] += device.memory.on_host
        if self.checkpoint_bytes or self.pictures_apart:
            total[CPU] += self.checkpoint_bytes + self.pictures_apart
        return dict(total)

    def overhead(self) -> dict[str, int]:
        """Return the bytes that CUDA itself takes on each GPU that is used."""
        used = dict.fromkeys(device.device for device in self.devices if device.memory.total)
        return {device: n_bytes for device in used if (n_bytes := overhead_bytes(device))}

    def shortages(self, free_bytes: Mapping[str, int]) -> dict[str, int]:
        """Return how many bytes each device lacks, reserve included; omit devices with enough.

        Args:
            free_bytes: free memory by device before this process uses any; unlisted devices are
                assumed to have enough.
        """
        usable = beside_reserve(free_bytes, self.reserve)
        return {
            device: needed - usable[device]
            for device, needed in self.bytes_by_device().items()
            if device in usable and needed > max(0, usable[device])
        }

    def check_fits(self, free_bytes: Mapping[str, int]) -> None:
        """Raise OutOfDeviceMemory for the device that lacks the most memory, if any does."""
        short = self.shortages(free_bytes)
        if short:
            device = max(short, key=lambda d: short[d])
            kept = dict(self.reserve).get(device, 0)
            is_for_pictures = device == self.pictures_device and short[device] <= self.pictures
            doing = Sentence(
                "to load the model and see images" if is_for_pictures else "to load the model"
            )
            if kept:
                doing = Sentence(
                    "{doing} and keep {size:.2f} GiB in reserve", doing=doing, size=kept / GIB
                )
            needed = self.bytes_by_device()[device] + kept
            error = OutOfDeviceMemory(device, needed, free_bytes[device], doing)
            error.hint = PICTURES_HINT if is_for_pictures else error.hint
            raise error


def beside_reserve(
    free_bytes: Mapping[str, int], reserve: Iterable[tuple[str, int]]
) -> dict[str, int]:
    """Return free minus reserved bytes by device; negative if too little is free."""
    kept = dict(reserve)
    return {device: free - kept.get(device, 0) for device, free in free_bytes.items()}


def make_plan(
    declaration: Declaration, params: LoadParams, free_bytes: Mapping[str, int] | None
) -> Plan:
    """Predict the bytes per rank of a declared model.

    Args:
        free_bytes: free memory by device, which decides whether weights are dequantised; if None,
            they are.

    Raises:
        EngineError: the KV type does not fit the heads.
    """
    caches = [state for state in declaration.states if isinstance(state, KVState)]
    for state in caches:
        state.check_type(params.kv_type)

    def sizes(storages: Sequence[str]) -> list[RankSize]:
        return [
            rank_size(declaration, rank, storage, params.kv_type)
            for rank, storage in enumerate(storages)
        ]

    plan = choose_plan(
        params, declaration.hp, declaration.devices, declaration.shares, sizes, free_bytes
    )
    return with_held_types(plan, caches)


def with_held_types(plan: Plan, caches: Iterable[KVState]) -> Plan:
    """Return a plan with the KV type that all `caches` actually use, if they share another one."""
    held = {str(state.held_types(plan.kv_type)) for state in caches}
    if len(held) != 1 or plan.kv_type in held:
        return plan
    (kv_type,) = held
    warning = Sentence(
        "This model's values are part of its keys, so its whole KV cache is {type}, the type chosen"
        " for keys; the type for values has no effect.",
        type=kv_type,
    )
    return replace(plan, kv_type=kv_type, warnings=(*plan.warnings, warning))


def choose_plan(
    params: LoadParams, hp: HParams, devices: Sequence[str], shares: Shares,
    sizes: Callable[[tuple[str, ...]], Sequence[RankSize]], free_bytes: Mapping[str, int] | None,
) -> Plan:  # fmt: skip
    """Return a plan with dequantised weights and large batches if there is room for them.

    Likewise, it has states for more than `FEW_GUESSED` draft tokens if there is room. The vision
    encoder is placed on the first of its candidate devices with room for it.

    Args:
        sizes: returns each rank's sizes, given all ranks' storage formats.
    """
    first, *others = params.picture_devices
    plan, found = _roomiest(params, hp, devices, shares, sizes, free_bytes)
    if plan.pictures_device and set(plan.shortages(free_bytes or {})) == {first}:
        for device in others:
            moved = replace(params, mmproj_device=device)
            other, its = _roomiest(moved, hp, devices, shares, sizes, free_bytes)
            if not other.shortages(free_bytes or {}):
                plan, found = other, its
                break
    n_bytes = sum(n * sum(layer.tensors) for size in found for n, layer in size.layers)
    return replace(plan, checkpoint_bytes=_checkpoint_bytes(params, plan, n_bytes, free_bytes))


def _checkpoint_bytes(
    params: LoadParams, plan: Plan, n_bytes: int, free_bytes: Mapping[str, int] | None
) -> int:
    # the default never makes a plan too large; `n_bytes` is a sequence's state size on all ranks
    if not n_bytes or params.checkpoint_bytes is not None:
        return (params.checkpoint_bytes or 0) if n_bytes else 0
    most = min(MAX_CHECKPOINT_BYTES, MAX_CHECKPOINTS * n_bytes)
    if free_bytes is None or CPU not in free_bytes:
        return most
    left = beside_reserve(free_bytes, params.reserve)[CPU] - plan.bytes_by_device().get(CPU, 0)
    share = min(CHECKPOINT_FRACTION * free_bytes[CPU], 2 * CHECKPOINT_FRACTION * left)
    return max(0, min(most, int(share)))


def _roomiest(
    params: LoadParams, hp: HParams, devices: Sequence[str], shares: Shares,
    sizes: Callable[[tuple[str, ...]], Sequence[RankSize]], free_bytes: Mapping[str, int] | None,
) -> tuple[Plan, Sequence[RankSize]]:  # fmt: skip
    # without state checkpoints
    usable = beside_reserve(free_bytes or {}, params.reserve)
    n_least = PROMPT_BATCH if params.n_batch is None else params.n_batch
    few = few_guessed(params)

    def with_storage(storage: str) -> tuple[Sequence[RankSize], Callable[[int, int], Plan]]:
        storages = tuple("kernels" if uses_kernels(d) else storage for d in devices)
        found = sizes(storages)
        return found, lambda *n: _plan(params, hp, devices, shares, storages, found, *n)

    found, planned = with_storage("f32")
    plan = planned(n_least, few)
    if "f32" in plan.storage and not _is_roomy(plan, usable, DENSE_FRACTION):
        found, planned = with_storage("packed")
        plan = planned(n_least, few)
    if any(map(machine_of, devices)):  # machines agree on sizes in advance
        return plan, found
    larger: list[tuple[int, int]] = []
    if params.n_batch is None and _is_all_on_gpus(plan, found):
        larger += [(n, few) for n in LARGE_PROMPT_BATCHES if n <= hp.n_ctx]
    roomy = (one for n in larger if _is_roomy(one := planned(*n), usable, LARGE_FRACTION))
    plan = next(roomy, plan)
    if plan.has_states and params.n_draft > few:
        more = planned(plan.n_batch, params.n_draft)
        plan = more if _is_roomy(more, usable, LARGE_FRACTION) else plan
    return plan, found


def _is_all_on_gpus(plan: Plan, sizes: Sequence[RankSize]) -> bool:
    return all(
        not is_cpu(device.device) and device.storage == "kernels"
        for device, size in zip(plan.devices, sizes, strict=True)
        if size.working != WorkingSizes()
    )


def _is_roomy(plan: Plan, free_bytes: Mapping[str, int], part: float) -> bool:
    return all(
        needed <= part * free_bytes[device]
        for device, needed in plan.bytes_by_device().items()
        if device in free_bytes
    )


def _plan(
    params: LoadParams, hp: HParams, devices: Sequence[str], shares: Shares,
    storages: Sequence[str], sizes: Sequence[RankSize], n_batch: int, n_guessed: int,
) -> Plan:  # fmt: skip
    elements = max(1, sum(size.elements for size in sizes))
    n_meeting = _n_meeting(devices, storages, sizes)
    layers = {layer for size in sizes for _, layer in size.layers}
    draft = draft_bytes(params, hp.n_ctx)
    pictures = vision_bytes(params, TextModel.of(hp))
    vision_device = params.picture_devices[0] if pictures else ""
    vision_rank = _largest_rank(devices, shares, vision_device)
    return Plan(
        devices=tuple(
            DevicePlan(
                rank=rank, device=device, asked=shares[rank],
                effective=sizes[rank].elements / elements, storage=storages[rank],
                memory=replace(
                    rank_memory(
                        params, hp, device, storages[rank], sizes[rank], n_meeting, n_batch,
                        n_guessed,
                    ),
                    draft=draft if rank == params.draft_rank else 0,
                    pictures=pictures if rank == vision_rank else 0,
                ),
            )
            for rank, device in enumerate(devices)
        ),
        split_mode=params.split_mode, n_ctx=hp.n_ctx, kv_type=params.kv_type,
        file_bytes=sum(size.file_bytes for size in sizes), warnings=_warnings(hp, params),
        reserve=params.reserve, n_batch=n_batch, parallel=params.parallel,
        windows=in_order(layer.window for layer in layers if not layer.tensors),
        has_states=any(layer.tensors for layer in layers), n_guessed=n_guessed,
        pictures_device=vision_device, pictures_apart=pictures if vision_rank is None else 0,
    )  # fmt: skip


def _largest_rank(devices: Sequence[str], shares: Shares, device: str) -> int | None:
    ranks = [rank for rank, its in enumerate(devices) if its == device]
    return max(ranks, key=lambda rank: shares[rank], default=None)


def _n_meeting(devices: Sequence[str], storages: Sequence[str], sizes: Sequence[RankSize]) -> int:
    # 0 unless all busy ranks are GPUs
    busy = [rank for rank, size in enumerate(sizes) if size.working != WorkingSizes()]
    if any(is_cpu(devices[rank]) or storages[rank] != "kernels" for rank in busy):
        return 0
    return len(busy)


def _warnings(hp: HParams, params: LoadParams) -> tuple[str, ...]:
    n_ctx, trained = hp.n_ctx, hp.n_ctx_train
    if n_ctx < params.context_for(trained):
        return (
            Sentence("The model has no positions beyond {n}, which limits the context.", n=n_ctx),
        )
    if trained and n_ctx > trained:
        warning = "The model was trained with {n} tokens of context; quality drops beyond that."
        return (Sentence(warning, n=trained),)
    return ()
