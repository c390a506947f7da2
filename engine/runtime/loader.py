"""From a file's bytes to the tensors of one rank: only its own slices are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu.packing import load_for_kernels
from engine.cpu.worker import Worker
from engine.errors import Cancelled, UnsupportedQuant
from engine.forward.weight import Weight
from engine.layers.module import Slot
from engine.ops.weights import DenseWeight, PackedWeight
from engine.planning.footprint import slot_pieces
from engine.progress import LoadProgress
from engine.quants.dequantise import QUANTS, dequantise
from engine.sharding.placement import Shard, Slices

if TYPE_CHECKING:
    from engine.gguf import GGUFFile, TensorInfo
    from engine.gpu.card import Card

Bytes = NDArray[np.uint8]
Bring = Callable[[Bytes], Tensor]
LoadMatrix = Callable[[Slot, Sequence[Slices]], Weight]

CHUNK_BYTES = 8 << 20
"""Read at a time; cancelling and progress take effect between chunks."""

PROGRESS_INTERVAL_S = 0.04


class Progress:
    """Counts the bytes that all ranks have read, and passes on that someone wants to stop.

    Args:
        doing: what is stopped then, as the first word of a sentence.
    """

    def __init__(
        self,
        total_bytes: int,
        on_progress: Callable[[LoadProgress], None],
        is_cancelled: Callable[[], bool],
        doing: str = "Loading",
    ) -> None:
        self._total = total_bytes
        self._doing = doing
        self._done = 0
        self._on_progress = on_progress
        self.is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._next_report = 0.0
        self._beside: dict[int, str] = {}

    def note(self, rank: int, doing: str) -> None:
        """Tell what a rank does beside reading; "" once that is done."""
        with self._lock:
            self._beside[rank] = doing
            self._report()

    def add(self, n_bytes: int) -> None:
        """Note that `n_bytes` more are done.

        Raises:
            Cancelled: the person has asked to stop.
        """
        self.check()
        with self._lock:
            self._done += n_bytes
            now = time.monotonic()
            if now >= self._next_report or self._done >= self._total:
                self._next_report = now + PROGRESS_INTERVAL_S
                self._report()

    def _report(self) -> None:
        doing = next(filter(None, self._beside.values()), "")
        self._on_progress(LoadProgress(self._done, self._total, doing))

    def check(self) -> None:
        """Raises:
        Cancelled: the person has asked to stop.
        """
        if self.is_cancelled():
            raise Cancelled(self._doing)


def check_types(path: str, slots: Sequence[Slot]) -> None:
    """Make sure that every tensor can be dequantised.

    Raises:
        UnsupportedQuant: names the first that cannot.
    """
    for slot in slots:
        if slot.tensor.type.number not in QUANTS:
            raise UnsupportedQuant(path, slot.tensor.type.name, slot.tensor.name)


def load_rank(
    file: GGUFFile,
    slots: Sequence[Slot],
    rank: int,
    device: torch.device,
    storage: str,
    worker: Worker | None,
    progress: Progress,
    card: Card | None = None,
) -> None:
    """Fill the attributes that `slots` name with this rank's parts.

    Args:
        storage: see `engine.planning.plan.DevicePlan`.
        worker: of a rank that computes with the CPU's kernels, else None.
        card: of a rank that computes with those for GPUs, else None.
    """
    with ExitStack() as stack:
        if card is None:
            bring: Bring = partial(_copied, progress=progress)
            load: LoadMatrix = partial(_load_for_cpu, file, worker=worker, progress=progress)
        else:
            from engine.gpu.loading import weight_loader  # Triton is not for the CPU

            staging = stack.enter_context(
                weight_loader.staging_for(slots, rank, device, progress.add)
            )
            bring = partial(weight_loader.send_bytes, staging=staging)
            load = partial(weight_loader.load_for_gpu, file, staging=staging, x_bytes=card.x_bytes)
        for slot in slots:
            pieces = slot_pieces(slot, rank)
            if pieces:
                value = _value(file, slot, pieces, device, storage, progress, bring, load)
                setattr(slot.owner, slot.attribute, value)
                file.release(slot.tensor)


def _value(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], device: torch.device, storage: str,
    progress: Progress, bring: Bring, load: LoadMatrix,
) -> Weight | Tensor:  # fmt: skip
    """A rank's part of one tensor.

    Args:
        bring: copies bytes of the file.
        load: makes a matrix for kernels.
    """
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    kind = slot.holding(storage)
    if kind == "packed":
        return _load_packed(file, slot.tensor, pieces, dim, device, bring)
    if kind != "f32":
        return load(slot, pieces)
    parts = [_dequantised(file, slot.tensor, piece, progress) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return DenseWeight(whole.to(device)) if slot.is_matrix else whole.to(device)


def _load_for_cpu(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], worker: Worker | None, progress: Progress
) -> Weight:
    assert worker is not None, "only ranks with kernels hold weights for them"
    return load_for_kernels(file, slot, pieces, worker, progress.add)


def _copied(raw: Bytes, progress: Progress) -> Tensor:
    """Bytes of the file in memory of their own."""
    rows = torch.empty(prod(raw.shape[:-1]), raw.shape[-1], dtype=torch.uint8)
    for part, chunk in _chunks(raw, progress):
        rows[part] = chunk
    return rows.view(raw.shape)


def _load_packed(
    file: GGUFFile,
    tensor: TensorInfo,
    pieces: Sequence[Slices],
    dim: int,
    device: torch.device,
    bring: Bring,
) -> Weight:
    """The file's bytes of the blocks that cover all pieces, joined along `dim`."""
    parts, columns, begin = [], [], 0
    for piece in pieces:
        raw, inside = _blocks(file, tensor, piece)
        parts.append(bring(raw))
        columns.append(torch.arange(begin + inside.start, begin + inside.stop))
        begin += raw.shape[-1] // tensor.type.type_size * tensor.type.block_size
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if dim != len(tensor.shape) - 1 or len(parts) == 1:
        kept: slice | Tensor = slice(int(columns[0][0]), int(columns[0][-1]) + 1)
    else:
        kept = torch.cat(columns).to(device)
    return PackedWeight(whole.to(device), tensor.type.number, kept)


def _dequantised(file: GGUFFile, tensor: TensorInfo, slices: Slices, progress: Progress) -> Tensor:
    """One piece in F32, worked on in chunks of rows."""
    raw, columns = _blocks(file, tensor, slices)
    n_columns = columns.stop - columns.start
    result = torch.empty(prod(raw.shape[:-1]), n_columns)
    for part, chunk in _chunks(raw, progress):
        result[part] = dequantise(chunk, tensor.type.number)[:, columns]
    return result.reshape(*raw.shape[:-1], n_columns)


def _chunks(raw: Bytes, progress: Progress) -> Iterator[tuple[slice, Tensor]]:
    """Copies of some rows at a time, with their place among all rows.

    Raises:
        Cancelled: the person has asked to stop.
    """
    n_columns = raw.shape[-1]
    step = max(1, CHUNK_BYTES // n_columns)
    done = 0
    for matrix in raw.reshape(-1, *raw.shape[-2:]) if raw.ndim > 1 else raw[None, None]:
        for start in range(0, len(matrix), step):
            chunk = torch.from_numpy(matrix[start : start + step].copy())
            progress.add(chunk.nbytes)
            yield slice(done, done + len(chunk)), chunk
            done += len(chunk)


def _blocks(file: GGUFFile, tensor: TensorInfo, slices: Slices) -> tuple[Bytes, slice]:
    """The whole blocks that cover a slice, and where in their elements the slice lies."""
    kind = tensor.type
    first = slices[-1].start // kind.block_size
    last = -(-slices[-1].stop // kind.block_size)
    raw = file.raw(tensor).reshape(*tensor.shape[:-1], -1)
    raw = raw[(*slices[:-1], slice(first * kind.type_size, last * kind.type_size))]
    start = slices[-1].start - first * kind.block_size
    return raw, slice(start, start + slices[-1].stop - slices[-1].start)
