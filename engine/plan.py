"""Where the bytes of a model will go, from its header alone: no torch, no weights.

`Planner` opens a file once and then evaluates plans; one evaluation walks the same declarations
that the loader later fills, so that what is predicted for weights and KV cache is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backend import uses_kernels
from engine.errors import GIB, OutOfDeviceMemory
from engine.events import MemoryUse
from engine.gguf import GGUFFile
from engine.info import ModelInfo, describe
from engine.kernels.extent import BF16_CHUNK, Extent, token_bytes
from engine.kernels.layout import BLOCK, LAYOUTS
from engine.layers.module import Slot
from engine.layers.state import CPU_STEP, DEVICE_STEP, KERNELS_STEP, KVState, RecurrentState
from engine.models.declare import Declaration, declare
from engine.parallel.placement import Shard, Slices

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.layers.hparams import HParams

F32_BYTES = 4
BF16_BYTES = 2
DENSE_FRACTION = 0.8
"""Weights are held dequantised if that takes no more than this part of any device's free memory."""

UNPACK_BYTES = 2 * F32_BYTES * (1 << 22)
"""Working memory of a packed matrix while it is dequantised in chunks."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One rank of a plan.

    Attributes:
        asked: the wanted share, 0 to 1; the shares of all ranks sum to 1.
        effective: the share of the model's weight elements that the rank really gets.
        memory: predicted bytes; weights and KV cache are exact, compute is an estimate.
        storage: how matrices are held: "f32" (dequantised, fast), "packed" (as in the file,
            dequantised on each use: slow, but small) or "kernels" (as the CPU's kernels read them:
            as small as in the file, and fast).
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
        n_ctx: context in tokens that the KV cache is made for.
        file_bytes: bytes of the file that all ranks together read.
        reserve: (device, bytes) that have to stay free.
    """

    devices: tuple[DevicePlan, ...]
    split_mode: str
    n_ctx: int
    kv_type: str
    file_bytes: int
    warnings: tuple[str, ...] = ()
    reserve: tuple[tuple[str, int], ...] = ()

    @property
    def storage(self) -> str:
        """How the ranks hold matrices, each way once: see `DevicePlan`."""
        return " + ".join(dict.fromkeys(d.storage for d in self.devices))

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> dict[str, int]:
        """Predicted bytes of each physical device; virtual ranks on one device add up.

        What GPUs keep in the host's memory counts for "cpu".
        """
        total: dict[str, int] = defaultdict(int)
        for device in self.devices:
            total[device.device] += device.memory.total
            if device.memory.host_kv:
                total["cpu"] += device.memory.host_kv
        return dict(total)

    def shortages(self, free_bytes: Mapping[str, int]) -> dict[str, int]:
        """The bytes that devices lack, beside what has to stay free; devices with enough are out.

        Args:
            free_bytes: free memory by device; others are taken to have enough.
        """
        usable = beside_reserve(free_bytes, self.reserve)
        return {
            device: needed - usable[device]
            for device, needed in self.bytes_by_device().items()
            if device in usable and needed > max(0, usable[device])
        }

    def check_fits(self, free_bytes: Mapping[str, int]) -> None:
        """Compare with what is free.

        Raises:
            OutOfDeviceMemory: names the device that lacks most.
        """
        short = self.shortages(free_bytes)
        if short:
            device = max(short, key=lambda d: short[d])
            kept = dict(self.reserve).get(device, 0)
            doing = "to load the model"
            if kept:
                doing += f" and keep {kept / GIB:.2f} GiB in reserve"
            needed = self.bytes_by_device()[device] + kept
            raise OutOfDeviceMemory(device, needed, free_bytes[device], doing)


def beside_reserve(
    free_bytes: Mapping[str, int], reserve: Iterable[tuple[str, int]]
) -> dict[str, int]:
    """What may be used of free memory, by device; below 0 where less is free than reserved."""
    kept = dict(reserve)
    return {device: free - kept.get(device, 0) for device, free in free_bytes.items()}


def keeps_kv_on_host(params: LoadParams, device: str) -> bool:
    """Whether the keys and values of a rank on `device` lie in the host's memory."""
    return params.kv_on_host and device != "cpu"


class Planner:
    """Evaluates plans for one file.

    Raises:
        ModelFileError: the file is missing or is no GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile.open(path)
        self.info: ModelInfo = describe(self._file)

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        """Predict bytes per rank.

        Args:
            free_bytes: free memory by device; decides how weights are held. Without it they are
                taken to be dequantised.

        Raises:
            ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
            SplitError: the split cannot be made.
            EngineError: the KV type does not fit the heads.
        """
        return make_plan(declare(self._file, params), params, free_bytes)

    def close(self) -> None:
        self._file.close()


def make_plan(
    declaration: Declaration, params: LoadParams, free_bytes: Mapping[str, int] | None
) -> Plan:
    """Predict bytes per rank of a declared model; see `Planner.plan`."""
    n_ctx = declaration.hp.n_ctx
    for state in declaration.states:
        if isinstance(state, KVState):
            state.check_type(params.kv_type)
    dense = _evaluate(declaration, params, n_ctx, "f32")
    if free_bytes is None or "f32" not in dense.storage:
        return dense
    if _is_roomy(dense, beside_reserve(free_bytes, params.reserve)):
        return dense
    return _evaluate(declaration, params, n_ctx, "packed")


def _is_roomy(plan: Plan, free_bytes: Mapping[str, int]) -> bool:
    return all(
        needed <= DENSE_FRACTION * free_bytes[device]
        for device, needed in plan.bytes_by_device().items()
        if device in free_bytes
    )


def _evaluate(declaration: Declaration, params: LoadParams, n_ctx: int, storage: str) -> Plan:
    ranks = range(len(declaration.devices))
    storages = ["kernels" if uses_kernels(d) else storage for d in declaration.devices]
    parts = [
        [(slot, piece) for slot in declaration.slots for piece in slot_pieces(slot, r)]
        for r in ranks
    ]
    elements = [sum(_n_elements(p) for slot, p in part if slot.is_matrix) for part in parts]
    devices = tuple(
        DevicePlan(
            rank=rank,
            device=declaration.devices[rank],
            asked=declaration.shares[rank],
            effective=elements[rank] / max(1, sum(elements)),
            storage=storages[rank],
            memory=_memory(declaration, params, rank, n_ctx, storages[rank]),
        )
        for rank in ranks
    )
    return Plan(
        devices=devices,
        split_mode=params.split_mode,
        n_ctx=n_ctx,
        kv_type=params.kv_type,
        file_bytes=sum(packed_bytes(slot, piece) for part in parts for slot, piece in part),
        warnings=_warnings(declaration, params),
        reserve=params.reserve,
    )


def _memory(
    declaration: Declaration, params: LoadParams, rank: int, n_ctx: int, storage: str
) -> MemoryUse:
    remembered = sum(s.n_bytes(rank, n_ctx, params.kv_type) for s in declaration.states)
    on_host = 0
    if keeps_kv_on_host(params, declaration.devices[rank]):
        states = (s for s in declaration.states if isinstance(s, KVState))
        on_host = sum(s.n_bytes(rank, n_ctx, params.kv_type) for s in states)
    return MemoryUse(
        weights=sum(held_bytes(slot, rank, storage) for slot in declaration.slots),
        kv=remembered - on_host,
        compute=_compute_bytes(declaration, params, rank, n_ctx, storage),
        host_kv=on_host,
    )


def slot_pieces(slot: Slot, rank: int) -> tuple[Slices, ...]:
    """The parts of a tensor that a rank holds; empty if none."""
    return slot.placement.pieces(slot.tensor.shape, rank)


def held_bytes(slot: Slot, rank: int, storage: str) -> int:
    """Bytes of one tensor on a rank, once loaded."""
    pieces, kind = slot_pieces(slot, rank), slot.holding(storage)
    if kind == "packed":
        return sum(packed_bytes(slot, piece) for piece in pieces)
    if kind == "planes":
        return _plane_bytes(slot, pieces)
    size = slot.tensor.type.type_size if kind == "plain" else F32_BYTES
    return size * sum(map(_n_elements, pieces))


def _plane_bytes(slot: Slot, pieces: Sequence[Slices]) -> int:
    """Bytes of a matrix in planes; intervals of rows share tiles, intervals of columns do not."""
    layout = LAYOUTS[slot.tensor.type.number]
    return sum(
        n_matrix * Extent.of(columns.start, columns.stop).n_bytes(layout, n_rows)
        for n_matrix, n_rows, columns in plane_parts(slot, pieces)
    )


def plane_parts(slot: Slot, pieces: Sequence[Slices]) -> list[tuple[int, int, slice]]:
    """What a rank holds of a matrix: (matrices, rows of each, columns) for each part."""
    shapes = [[part.stop - part.start for part in piece] for piece in pieces]
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    if not pieces or dim == len(shapes[0]) - 1:
        return [
            (prod(shape[:-2]), shape[-2], piece[-1])
            for shape, piece in zip(shapes, pieces, strict=True)
        ]
    whole = list(shapes[0])
    whole[dim] = sum(shape[dim] for shape in shapes)
    return [(prod(whole[:-2]), whole[-2], pieces[0][-1])]


def packed_bytes(slot: Slot, slices: Slices) -> int:
    """Bytes of the file's blocks that cover a slice."""
    kind = slot.tensor.type
    columns = slices[-1]
    n_blocks: int = -(-columns.stop // kind.block_size) - columns.start // kind.block_size
    return _n_elements(slices[:-1]) * n_blocks * kind.type_size


def _n_elements(slices: Slices) -> int:
    return prod(int(part.stop - part.start) for part in slices)


def _compute_bytes(
    declaration: Declaration, params: LoadParams, rank: int, n_ctx: int, storage: str
) -> int:
    """An estimate of the largest working set of one pass, from the sizes of its tensors."""
    hp, split = declaration.hp, declaration.split
    blocks = [b for b in split.blocks if rank in b.group]
    rows = split.output.size(rank)
    if not blocks and not rows:
        return 0
    n_tokens = min(params.n_batch, n_ctx)
    columns = max((max(b.ffn.size(rank), b.experts.size(rank)) for b in blocks), default=0)
    heads = max((b.heads.size(rank) for b in blocks), default=0)
    keys = (s.head_dim_k for s in declaration.states if isinstance(s, KVState))
    head_dim = max(keys, default=0)  # of latents, where those are the keys
    recurrent = (s.n_work(rank) for s in declaration.states if isinstance(s, RecurrentState))
    per_token = 6 * hp.n_embd + 3 * columns + 4 * heads * head_dim + max(recurrent, default=0)
    step = CPU_STEP if declaration.devices[rank] == "cpu" else DEVICE_STEP
    step = KERNELS_STEP if storage == "kernels" else step
    attention = max(
        (
            state.n_work(rank, n_tokens, n_ctx, step)
            for state in declaration.states
            if isinstance(state, KVState)
        ),
        default=0,
    )
    unpack = UNPACK_BYTES if storage == "packed" else 0
    if storage == "kernels":
        widest = max(columns, heads * head_dim, hp.n_embd)
        unpack = BF16_BYTES * (BF16_CHUNK + n_tokens * widest)
        unpack += n_tokens * -(-widest // BLOCK) * token_bytes(x_bytes(hp))
    values = n_tokens * per_token + attention + rows + hp.n_vocab
    return F32_BYTES * values + unpack


def x_bytes(hp: HParams) -> int:
    """Bytes of a quantised activation: two where a router sends tokens to experts.

    Rounding to one byte moves a router's scores by about 1 %, and two experts are often closer.
    """
    return 2 if any(hp.n_ff_exp) else 1


def _warnings(declaration: Declaration, params: LoadParams) -> tuple[str, ...]:
    n_ctx, trained = declaration.hp.n_ctx, declaration.hp.n_ctx_train
    if n_ctx < params.context_for(trained):
        return (f"The model knows no positions beyond {n_ctx}, so its context is that long.",)
    if trained and n_ctx > trained:
        return (f"The model was trained for {trained} tokens of context; beyond that it degrades.",)
    return ()
