"""From a file's bytes to the tensors of one rank: only its own slices are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import Cancelled, UnsupportedQuant
from engine.forward.weight import Weight
from engine.layers.module import Slot
from engine.ops.file_bytes import chunks
from engine.ops.weights import DenseWeight, PackedWeight
from engine.planning.footprint import slot_pieces
from engine.progress import LoadProgress
from engine.quants.dequantise import QUANTS, dequantise
from engine.sharding.placement import Shard, Slices

if TYPE_CHECKING:
    from engine.gguf import GGUFFile, TensorInfo
    from engine.runtime.backend import Backend, WeightLoader

Bytes = NDArray[np.uint8]

PROGRESS_INTERVAL_S = 0.04


class ByteProgress:
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
    backend: Backend,
    progress: ByteProgress,
) -> None:
    """Fill the attributes that `slots` name with this rank's parts.

    Args:
        storage: form of the rank's matrices, see `engine.planning.plan.DevicePlan`.
    """
    with backend.loader(file, slots, rank, progress.add) as loader:
        for slot in slots:
            pieces = slot_pieces(slot, rank)
            if pieces:
                value = _value(file, slot, pieces, device, storage, progress, loader)
                setattr(slot.owner, slot.attribute, value)
                file.release(slot.tensor)


def _value(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], device: torch.device, storage: str,
    progress: ByteProgress, loader: WeightLoader,
) -> Weight | Tensor:  # fmt: skip
    """Return a rank's part of one tensor."""
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    kind = slot.holding(storage)
    if kind == "packed":
        return _load_packed(file, slot.tensor, pieces, dim, device, loader)
    if kind != "f32":
        return loader.matrix(slot, pieces)
    parts = [_dequantised(file, slot.tensor, piece, progress) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return DenseWeight(whole.to(device)) if slot.is_matrix else whole.to(device)


def _load_packed(
    file: GGUFFile,
    tensor: TensorInfo,
    pieces: Sequence[Slices],
    dim: int,
    device: torch.device,
    loader: WeightLoader,
) -> Weight:
    """The file's bytes of the blocks that cover all pieces, joined along `dim`."""
    parts, columns, begin = [], [], 0
    for piece in pieces:
        raw, inside = _blocks(file, tensor, piece)
        parts.append(loader.bring(raw))
        columns.append(torch.arange(begin + inside.start, begin + inside.stop))
        begin += raw.shape[-1] // tensor.type.type_size * tensor.type.block_size
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if dim != len(tensor.shape) - 1 or len(parts) == 1:
        kept: slice | Tensor = slice(int(columns[0][0]), int(columns[0][-1]) + 1)
    else:
        kept = torch.cat(columns).to(device)
    return PackedWeight(whole.to(device), tensor.type.number, kept)


def _dequantised(
    file: GGUFFile, tensor: TensorInfo, slices: Slices, progress: ByteProgress
) -> Tensor:
    """One piece in F32, worked on in chunks of rows."""
    raw, columns = _blocks(file, tensor, slices)
    n_columns = columns.stop - columns.start
    result = torch.empty(prod(raw.shape[:-1]), n_columns)
    for part, chunk in chunks(raw, progress.add):
        result[part] = dequantise(chunk, tensor.type.number)[:, columns]
    return result.reshape(*raw.shape[:-1], n_columns)


def _blocks(file: GGUFFile, tensor: TensorInfo, slices: Slices) -> tuple[Bytes, slice]:
    """The whole blocks that cover a slice, and where in their elements the slice lies."""
    kind = tensor.type
    first = slices[-1].start // kind.block_size
    last = -(-slices[-1].stop // kind.block_size)
    raw = file.raw(tensor).reshape(*tensor.shape[:-1], -1)
    raw = raw[(*slices[:-1], slice(first * kind.type_size, last * kind.type_size))]
    start = slices[-1].start - first * kind.block_size
    return raw, slice(start, start + slices[-1].stop - slices[-1].start)
