"""Packs a file's rows into planes, using a rank's threads, which also read the file."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running import compiled
from engine.backends.cpu.large_pages import LARGE_PAGE, WeightArena
from engine.backends.reference.weights import FileReader
from engine.formats.gguf.tensor_bytes import LONG_ROW, TensorBytes
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.encode import coded_rows
from engine.formats.quants.layout import BLOCK, CODED, TILE, Extent, file_blocks, n_tiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.backends.cpu.worker import Worker

    Bytes = NDArray[np.uint8]

READ_BYTES = 256 << 10
"""Bytes that a thread reads at a time; they and their planes fit in a core's cache."""

MIN_JOB, MAX_JOB = 4 << 20, 256 << 20
"""Minimum and maximum size of a job, in bytes; progress is reported after each job."""

JOB_S = 0.02, 0.08
"""Target range for a job's duration, in seconds; the next job is resized accordingly."""

TURNS = 4
"""Minimum number of turns per thread, so that no thread has to wait long at the end."""


class FilePacker:
    """Packer for one rank's rows during a load; adapts its job size to the drive's speed.

    Attributes:
        worker: the rank's threads.
        report: callback with the number of packed bytes; may raise to stop.
        reader: reader for the file, used if compiled code cannot read it.
        memory: memory for the packed matrices.
    """

    def __init__(self, worker: Worker, report: Callable[[int], None], reader: FileReader) -> None:
        self.worker = worker
        self.report = report
        self.reader = reader
        self.memory = WeightArena()
        self._job_bytes = MIN_JOB
        self._buffers = torch.empty(0, dtype=torch.uint8)
        self._progress = np.zeros(2, np.int64)

    def pack(
        self, rows: TensorBytes, number: int, extent: Extent, planes: Tensor, goal_row: int,
        counted: int,
    ) -> None:  # fmt: skip
        """Pack rows into the planes of one matrix.

        Args:
            rows: bytes of the rows (n_rows, row_bytes) in the file.
            number: id of the GGML type.
            extent: columns to pack.
            planes: the matrix's planes (n_tiles, tile_bytes).
            goal_row: row index in the matrix at which to start.
            counted: bytes to report per row.

        Raises:
            ModelFileError: the file has been truncated, or its drive fails.
        """
        start = 0
        while start < len(rows):
            # jobs end at tile boundaries, so that no two write the same tile
            last_tile = (goal_row + start + self._job_bytes // rows.shape[1]) // TILE
            stop = min(len(rows), max((last_tile + 1) * TILE - goal_row, start + 1))
            with self._job((stop - start) * counted):
                self._pack(rows[start:stop], number, extent, planes, goal_row + start)
            start = stop

    def copy(self, rows: TensorBytes, goal: Tensor) -> None:
        """Read a matrix's rows (n_rows, row_bytes) into bytes of the same shape.

        Raises:
            ModelFileError: the file has been truncated, or its drive fails.
        """
        start = 0
        while start < len(rows):
            stop = min(len(rows), start + max(1, self._job_bytes // rows.shape[1]))
            part = slice(start, stop)
            with self._job(rows[part].nbytes):
                if not self._read(rows[part], goal[part]):
                    self.reader.read_into(rows[part], goal[part].numpy())
            start = stop

    @contextmanager
    def _job(self, counted: int) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._adapt(time.perf_counter() - begun)
        self.report(counted)

    def _adapt(self, seconds: float) -> None:
        if seconds < JOB_S[0]:
            self._job_bytes = min(MAX_JOB, 2 * self._job_bytes)
        elif seconds > JOB_S[1]:
            self._job_bytes = max(MIN_JOB, self._job_bytes // 2)

    def _pack(
        self, rows: TensorBytes, number: int, extent: Extent, planes: Tensor, goal_row: int
    ) -> None:
        if number not in CODED and self._pack_file(rows, number, extent, planes, goal_row):
            return
        # otherwise, or after an error, Python reads and reports the reason
        for start, chunk in self.reader.chunks(rows):
            pack_rows(chunk, number, extent, planes, goal_row + start, self.worker)

    def _pack_file(
        self, rows: TensorBytes, number: int, extent: Extent, planes: Tensor, goal_row: int
    ) -> bool:
        """Pack rows entirely in compiled code; return False if that is not possible."""
        read = read_address()
        if not read:
            return False
        n_threads, (n_rows, row_bytes) = self.worker.n_threads, rows.shape
        stride = rows.strides[0]
        is_apart = row_bytes >= LONG_ROW and stride > row_bytes
        buffer_stride, rows_per_read = (row_bytes, 1) if is_apart else (stride, n_rows)
        per_read = max(1, READ_BYTES // (TILE * buffer_stride))
        buffer_bytes = per_read * TILE * buffer_stride
        if len(self._buffers) < n_threads * buffer_bytes:
            self._buffers = torch.empty(n_threads * buffer_bytes, dtype=torch.uint8)
        per_turn = min(LARGE_PAGE // planes.shape[-1], n_tiles(n_rows) // (n_threads * TURNS))
        self._progress[:] = 0
        self.worker.pool.wake()
        compiled.pack_file(number)(
            self.worker.pool.address, read, rows.part.descriptor, rows.offset, stride, row_bytes,
            rows_per_read, self._buffers.data_ptr(), buffer_bytes, buffer_stride,
            self._progress.ctypes.data, max(1, per_turn), per_read, n_threads, n_rows, goal_row,
            extent.first, extent.n_blocks, planes.data_ptr(), planes.shape[-1],
        )  # fmt: skip
        return not self._progress[1]

    def _read(self, rows: TensorBytes, goal: Tensor) -> bool:
        """Read rows in compiled code; return False if that is not possible."""
        read = read_address()
        if not read or not rows.is_contiguous:
            return False
        self._progress[:] = 0
        self.worker.pool.wake()
        compiled.read_file()(
            self.worker.pool.address, read, rows.part.descriptor, rows.offset, goal.data_ptr(),
            rows.nbytes, LARGE_PAGE, self._progress.ctypes.data,
        )  # fmt: skip
        return not self._progress[0]


@cache
def read_address() -> int:
    """Return the address of the system's pread; 0 if there is none."""
    if sys.platform == "win32":
        return 0
    return ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value or 0


def pack_rows(
    rows: Bytes, number: int, extent: Extent, target: Tensor, target_row: int, worker: Worker
) -> None:
    """Pack whole rows from a file into a matrix's planes `target`, starting at `target_row`.

    Args:
        number: id of the GGML type.
    """
    address, row_bytes = rows.ctypes.data, rows.strides[0]
    if number in CODED:
        info = TYPES[number]
        begin, end = file_blocks(info.block_size, extent)
        blocks = torch.from_numpy(rows[:, begin * info.type_size : end * info.type_size].copy())
        coded = coded_rows(blocks, number)
        row_bytes = coded.shape[1]
        block_bytes = row_bytes * BLOCK // ((end - begin) * info.block_size)
        # address of the whole row's first block, as group boundaries are relative to it
        address = coded.data_ptr() - begin * info.block_size // BLOCK * block_bytes
    worker.pool.wake()
    compiled.pack_rows(number)(
        worker.pool.address, address, row_bytes, len(rows), target_row, extent.first,
        extent.n_blocks, target.data_ptr(), target.shape[-1],
    )  # fmt: skip
