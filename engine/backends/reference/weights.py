"""Reference implementations of `Weight`: dequantised matrices, and matrices packed as in the file.

Both have the same values: a packed matrix is dequantised exactly on each use. Because this is slow,
packed matrices are used only if dequantised ones would not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from engine.formats.gguf.tensor_bytes import TensorBytes
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import dequantise
from engine.hardware.devices.host import usable_cores
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import ALL

CHUNK_ELEMENTS = 1 << 22
"""Number of elements of a packed matrix to dequantise at a time, into reused memory."""

_scratch = threading.local()


class DenseWeight:
    """A dequantised matrix, or one per expert or head.

    Args:
        data: F32 values, (n_out, n_in) or (n, n_out, n_in).
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.data)

    def lookup(self, ids: Tensor) -> Tensor:
        return gathered_rows(ids, len(self.data), lambda rows: self.data.index_select(0, rows))

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        return torch.cat([linear(x[rows], self.data[expert]) for expert, rows in groups])

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        matrices = self.data[:, rows]
        if not transposed:
            matrices = matrices.transpose(1, 2)
        return (x.transpose(0, 1) @ matrices).transpose(0, 1)


class PackedWeight:
    """A matrix in the file's blocks, or one per expert or head; dequantised on each use.

    Args:
        raw: whole blocks, uint8 (n_out, row_bytes) or (n, n_out, row_bytes).
        type_number: id of the GGML type.
        columns: the rank's elements in a dequantised row, as a slice or as indices; boundaries may
            be inside a block.
    """

    def __init__(self, raw: Tensor, type_number: int, columns: slice | Tensor) -> None:
        self.raw = raw
        self.type_number = type_number
        self.columns = columns

    @property
    def n_bytes(self) -> int:
        return self.raw.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        info = TYPES[self.type_number]
        n_held = self.raw.shape[-1] // info.type_size * info.block_size
        step = max(1, CHUNK_ELEMENTS // n_held)
        y = x.new_empty(x.shape[0], self.raw.shape[0])
        for start in range(0, self.raw.shape[0], step):
            raw = self.raw[start : start + step]
            rows = _scratch_rows(raw.shape[0], n_held, raw.device)
            dequantise(raw, self.type_number, out=rows)
            y[:, start : start + step] = self._product(x, rows[:, self.columns])
        return y

    def _product(self, x: Tensor, rows: Tensor) -> Tensor:
        return linear(x, rows)

    def lookup(self, ids: Tensor) -> Tensor:
        def rows_of(rows: Tensor) -> Tensor:
            raw = self.raw.index_select(0, rows)
            return dequantise(raw, self.type_number)[:, self.columns]

        return gathered_rows(ids, len(self.raw), rows_of)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        return torch.cat([self._expert(expert).matmul(x[rows]) for expert, rows in groups])

    def _expert(self, index: int) -> PackedWeight:
        return PackedWeight(self.raw[index], self.type_number, self.columns)

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        heads = []
        for head, raw in enumerate(self.raw):
            matrix = dequantise(raw[rows], self.type_number)[:, self.columns]
            heads.append(x[:, head] @ (matrix if transposed else matrix.T))
        return torch.stack(heads, dim=1)


def _scratch_rows(n_rows: int, n_columns: int, device: torch.device) -> Tensor:
    """Return this thread's F32 scratch memory as (n_rows, n_columns).

    It is reused because page faults in new memory would cost more than dequantising.
    """
    buffer = getattr(_scratch, "buffer", None)
    needed = n_rows * n_columns
    if buffer is None or buffer.numel() < needed or buffer.device != device:
        buffer = torch.empty(max(needed, CHUNK_ELEMENTS), device=device)
        _scratch.buffer = buffer
    rows: Tensor = buffer[:needed].view(n_rows, n_columns)
    return rows


def release_scratch() -> None:
    """Free this thread's scratch memory."""
    _scratch.buffer = None


def gathered_rows(ids: Tensor, n_rows: int, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows `ids`; those for ids outside 0 to n_rows - 1 are zeros.

    Args:
        rows_of: function that returns the rows of valid ids.
    """
    is_held = (ids >= 0) & (ids < n_rows)
    rows = rows_of(ids.clamp(0, n_rows - 1))
    return rows.where(is_held[:, None], rows.new_zeros(()))


Bytes = NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
"""Size of a chunk in bytes; loads can be cancelled and progress reported between chunks."""

SHARE_BYTES = 1 << 20
"""Minimum bytes per reading thread in a chunk; less is not worth a thread switch."""

N_READERS = 4
"""Number of reading threads; a single one cannot keep up with fast drives and many cores."""


class FileReader:
    """Reader that splits a file into chunks; threads read the next chunk while one is in use.

    As a context manager, it waits on exit for the threads, which start on demand.
    """

    def __init__(self) -> None:
        self._n_threads = min(N_READERS, usable_cores())
        self._threads = ThreadPoolExecutor(self._n_threads, "tandem-read")
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def chunks(self, matrix: TensorBytes) -> Iterator[tuple[int, Bytes]]:
        """Read a matrix, some rows at a time.

        Yields:
            The index of the first row, and the rows (n, row_bytes), which the chunk after the next
            overwrites.
        """
        starts, step = _steps(matrix)
        reads: list[Callable[[], Bytes]] = []
        for index, start in enumerate(starts):
            rows = matrix[start : start + step]
            reads.append(self._begin(rows, self._buffer(index % 2, rows)))
            if index:
                yield starts[index - 1], reads.pop(0)()
        for read in reads:
            yield starts[-1], read()

    def _buffer(self, index: int, rows: TensorBytes) -> Bytes:
        if len(self._buffers[index]) < rows.nbytes:
            self._buffers[index] = np.empty(rows.nbytes, np.uint8)
        return self._buffers[index][: rows.nbytes].reshape(rows.shape)

    def read_into(self, rows: TensorBytes, goal: Bytes) -> None:
        """Read a matrix's rows into an array of the same shape."""
        self._begin(rows, goal)()

    def _begin(self, rows: TensorBytes, goal: Bytes) -> Callable[[], Bytes]:
        """Start reading rows; return a function that waits for them.

        This thread does small reads immediately.
        """
        n_share = min(self._n_threads, rows.nbytes // SHARE_BYTES)
        work: list[Future[None]] = []
        if n_share > 1:
            step = -(-len(rows) // n_share)
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                work.append(self._threads.submit(rows[part].read_into, goal[part]))
        else:
            rows.read_into(goal)

        def wait() -> Bytes:
            for share in work:
                share.result()
            return goal

        return wait


def copied(raw: TensorBytes, report: Callable[[int], None], reader: FileReader) -> Tensor:
    """Copy bytes (…, row_bytes) from the file to new memory.

    Args:
        report: callback with the number of bytes read; may raise to stop.
    """
    stack = raw.stack()
    out = torch.empty(stack.shape, dtype=torch.uint8)
    for index in range(len(stack)):
        copy_rows(stack[index], out[index].numpy(), report, reader)
    return out.view(raw.shape)


def copy_rows(
    matrix: TensorBytes, goal: Bytes, report: Callable[[int], None], reader: FileReader
) -> None:
    """Read a matrix into an array of the same shape, some rows at a time.

    Args:
        report: callback with the number of bytes read; may raise to stop.
    """
    starts, step = _steps(matrix)
    for start in starts:
        chunk = matrix[start : start + step]
        reader.read_into(chunk, goal[start : start + step])
        report(chunk.nbytes)


def chunks(raw: TensorBytes, report: Callable[[int], None]) -> Iterator[tuple[slice, Tensor]]:
    """Copy some rows at a time; yield their slice of all rows, and the copy.

    Args:
        report: callback with the size of each chunk, before it is yielded; may raise to stop.
    """
    stack, done = raw.stack(), 0
    for index in range(len(stack)):
        starts, step = _steps(stack[index])
        for start in starts:
            chunk = torch.from_numpy(stack[index, start : start + step].read())
            report(chunk.nbytes)
            yield slice(done, done + len(chunk)), chunk
            done += len(chunk)


def _steps(matrix: TensorBytes) -> tuple[range, int]:
    """Return the first row of each chunk in a matrix, and the number of rows per chunk."""
    step = max(1, CHUNK_BYTES // max(1, matrix.shape[-1]))
    return range(0, len(matrix), step), step
