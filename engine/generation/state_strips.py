"""Copying of tensors between state files and caches in strips, with few reads, writes and copies.

In the file, a tensor with keys or values is (units, rows, width): heads, and each head's positions
in order. In a rank's memory, a unit's rows are in *slots*, page by page. A strip is read or written
in one go, and moved with one copy per run of adjacent slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from engine.errors import Cancelled
from engine.runtime.memory import CachedRows
from engine.util.progress import IsCancelled, StateProgress, StateSink

STRIP_BYTES = 1 << 20
"""Maximum size of a strip in bytes, unless a single row is larger; it fits in a core's cache."""


class CopyProgress:
    """Progress of a copy in bytes, and its cancellation check.

    Args:
        total: total number of bytes to copy.
        doing: first word of the message if the copy is cancelled, such as "Saving".
    """

    def __init__(
        self, total: int, on_progress: StateSink, is_cancelled: IsCancelled, doing: str
    ) -> None:
        self._total, self._done = total, 0
        self._on_progress, self._is_cancelled, self._doing = on_progress, is_cancelled, doing

    def add(self, n_bytes: int) -> None:
        """Report that `n_bytes` more were copied.

        Raises:
            Cancelled: the user has cancelled.
        """
        if self._is_cancelled():
            raise Cancelled(self._doing)
        self._done += n_bytes
        self._on_progress(StateProgress(self._done, self._total))


class Strip(NamedTuple):
    """A part of a tensor (units, rows, width) that is contiguous in a file.

    Attributes:
        units: range of units.
        rows: range of rows in each unit; if there are several units, all rows in the file.
    """

    units: range
    rows: range


def strips(units: range, n_used: int, n_rows: int, row_bytes: int) -> Iterator[Strip]:
    """Cut the first `n_used` of `n_rows` rows per unit, of `row_bytes` bytes each, into strips."""
    if n_used == n_rows and 0 < n_rows * row_bytes <= STRIP_BYTES:
        step = STRIP_BYTES // (n_rows * row_bytes)
        for at in range(0, len(units), step):
            yield Strip(units[at : at + step], range(n_rows))
        return
    step = max(1, STRIP_BYTES // row_bytes)
    for unit in units:
        for at in range(0, n_used, step):
            yield Strip(range(unit, unit + 1), range(at, min(at + step, n_used)))


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous CPU tensor's bytes as views, a strip at a time."""
    data = tensor.view(-1).view(torch.uint8)
    for at in range(0, len(data), STRIP_BYTES):
        yield data[at : at + STRIP_BYTES]


def strips_of(rows: CachedRows) -> Iterator[CachedRows]:
    """Yield the rows in a rank's units as strips."""
    for strip in strips(range(*rows.units), rows.n_rows, rows.n_rows, rows.row_bytes):
        yield _part(rows, strip)


def read_units(
    file: BinaryIO, begin: int, n_rows: int, first: int, rows: CachedRows,
    put: Callable[[CachedRows, Tensor], None], progress: CopyProgress,
) -> None:  # fmt: skip
    """Read units of a file's tensor into a rank's memory.

    Args:
        begin: offset of the tensor in the file.
        n_rows: number of rows per unit in the file.
        first: index of the unit in the file that becomes the first one in `rows`.
        rows: destination of each unit's first rows; there may be fewer than in the file.
        put: copies rows to their destination.

    Raises:
        OSError: the file was truncated.
        Cancelled: the user has cancelled.
    """
    for strip in strips(range(*rows.units), rows.n_rows, n_rows, rows.row_bytes):
        part = _part(rows, strip)
        buffer, unit = part.room(), first + strip.units.start - rows.units[0]
        file.seek(begin + (unit * n_rows + strip.rows.start) * rows.row_bytes)
        _read_into(file, buffer)
        put(part, buffer)
        progress.add(buffer.nbytes)


def read_whole(file: BinaryIO, begin: int, tensor: Tensor, progress: CopyProgress) -> None:
    """Read a tensor from a file into a contiguous one on the CPU; see `read_units`."""
    file.seek(begin)
    for piece in pieces(tensor):
        _read_into(file, piece)
        progress.add(piece.nbytes)


def write(file: BinaryIO, part: Tensor) -> None:
    """Write the bytes of a contiguous tensor on the CPU."""
    file.write(part.view(-1).view(torch.uint8).numpy().data)


def _read_into(file: BinaryIO, tensor: Tensor) -> None:
    data = tensor.view(-1).view(torch.uint8).numpy().data
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise OSError("it has become shorter")


def _part(rows: CachedRows, strip: Strip) -> CachedRows:
    slots, at = [], 0
    for start, stop in rows.slots:
        begin, end = max(at, strip.rows.start), min(at + stop - start, strip.rows.stop)
        if begin < end:
            slots.append((start + begin - at, start + end - at))
        at += stop - start
    return rows._replace(units=(strip.units.start, strip.units.stop), slots=slots)
