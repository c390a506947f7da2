"""Loader of one rank's tensors from a file; reads only the rank's own slices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.reference.weights import DenseWeight, PackedWeight, chunks
from engine.errors import Cancelled, UnsupportedQuant
from engine.formats.quants.dequantise import QUANTS, dequantise
from engine.model.forward.operands import Weight
from engine.model.layers.module import Slot
from engine.model.sharding.placement import Shard, Slices
from engine.planning.footprint import slot_pieces
from engine.util.progress import LoadProgress

if TYPE_CHECKING:
    from engine.backends.reference.backend import Backend, WeightLoader
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.formats.gguf.tensors import TensorInfo

PROGRESS_INTERVAL_S = 0.04
"""Smallest time between two reports of progress, in seconds."""


class ByteProgress:
    """Progress of a load in bytes, summed over all ranks, with its cancellation check.

    Args:
        total_bytes: number of bytes that all ranks will read.
        on_progress: called with the progress, from several threads, one at a time.
        is_cancelled: returns whether the user has asked to stop.
        doing: name of the work for the message of `Cancelled`, such as "Loading".

    Attributes:
        is_cancelled: returns whether the user has asked to stop.
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
        self._other_work: dict[int, str] = {}

    def note(self, rank: int, doing: str) -> None:
        """Report other work of a rank, such as compiling; "" once that is done."""
        with self._lock:
            self._other_work[rank] = doing
            self._report()

    def add(self, n_bytes: int) -> None:
        """Count `n_bytes` more as read, and report that at most every `PROGRESS_INTERVAL_S`.

        Raises:
            Cancelled: the user has asked to stop.
        """
        self.check()
        with self._lock:
            self._done += n_bytes
            now = time.monotonic()
            if now >= self._next_report or self._done >= self._total:
                self._next_report = now + PROGRESS_INTERVAL_S
                self._report()

    def _report(self) -> None:
        """Call `on_progress`; the caller holds the lock."""
        doing = next(filter(None, self._other_work.values()), "")
        self._on_progress(LoadProgress(self._done, self._total, doing))

    def check(self) -> None:
        """Check for a cancellation.

        Raises:
            Cancelled: the user has asked to stop.
        """
        if self.is_cancelled():
            raise Cancelled(self._doing)


def check_types(path: str, slots: Sequence[Slot]) -> None:
    """Check that every tensor can be dequantised.

    Raises:
        UnsupportedQuant: a tensor cannot; names the first one.
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
    """Load a rank's parts of tensors into the attributes that `slots` name.

    Args:
        file: file of the model.
        slots: tensors to load and the attributes of the rank's modules that hold them.
        rank: number of the rank.
        device: device of the rank.
        storage: form of the rank's matrices, see `engine.planning.plan.DevicePlan`.
        backend: backend of the rank.
        progress: progress of all ranks' loads.

    Raises:
        ModelFileError: the file has been changed or cut short, or its drive fails.
        Cancelled: the user has asked to stop.
    """
    with backend.loader(file, slots, rank, progress.add) as loader:
        for slot in slots:
            pieces = slot_pieces(slot, rank)
            if pieces:
                value = _value(file, slot, pieces, device, storage, progress, loader)
                setattr(slot.owner, slot.attribute, value)
    file.check_unchanged()


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
    """Return a matrix as the file's bytes: the blocks that cover all pieces, joined along `dim`."""
    parts, columns, begin = [], [], 0
    for piece in pieces:
        raw, inside = _blocks(file, tensor, piece)
        parts.append(loader.copy_bytes(raw))
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
    """Return one piece of a tensor in F32; dequantises it in chunks of rows."""
    raw, columns = _blocks(file, tensor, slices)
    n_columns = columns.stop - columns.start
    result = torch.empty(prod(raw.shape[:-1]), n_columns)
    for part, chunk in chunks(raw, progress.add):
        result[part] = dequantise(chunk, tensor.type.number)[:, columns]
    return result.reshape(*raw.shape[:-1], n_columns)


def _blocks(file: GGUFFile, tensor: TensorInfo, slices: Slices) -> tuple[TensorBytes, slice]:
    """Return the whole blocks that cover a slice, and the range of the slice's columns in them."""
    kind = tensor.type
    first = slices[-1].start // kind.block_size
    last = -(-slices[-1].stop // kind.block_size)
    raw = file.raw(tensor)[(*slices[:-1], slice(first * kind.type_size, last * kind.type_size))]
    start = slices[-1].start - first * kind.block_size
    return raw, slice(start, start + slices[-1].stop - slices[-1].start)
