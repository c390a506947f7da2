"""Reads large parts of a file in chunks, so that a load can be stopped, ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.formats.gguf.tensor_bytes import TensorBytes
from engine.hardware.devices.host import usable_cores

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk; cancelling and progress take effect between chunks."""

SHARE_BYTES = 1 << 20
"""Least bytes of a chunk for each thread that reads it; fewer take longer to hand over."""

N_READERS = 4
"""Number of threads that read: one alone does not keep up with fast drives and many cores."""


class FileReader:
    """Reader of chunks of a file; while one is used, threads read the next.

    Use as a context manager: its end waits for the threads. They begin when they are needed.
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
        """Read some rows of a matrix at a time.

        Yields:
            The number of the first row, and the rows (n, row_bytes), which the next chunk but one
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
        """Return memory for a chunk."""
        if len(self._buffers[index]) < rows.nbytes:
            self._buffers[index] = np.empty(rows.nbytes, np.uint8)
        return self._buffers[index][: rows.nbytes].reshape(rows.shape)

    def read_into(self, rows: TensorBytes, goal: Bytes) -> None:
        """Read rows of a matrix into an array of the same shape."""
        self._begin(rows, goal)()

    def _begin(self, rows: TensorBytes, goal: Bytes) -> Callable[[], Bytes]:
        """Begin to read rows; return a function that waits for them.

        What is small is read at once, by this thread.
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
    """Copy bytes (…, row_bytes) of the file into memory of their own.

    Args:
        report: callback that gets the number of bytes read; may raise to stop.
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
        report: callback that gets the number of bytes read; may raise to stop.
    """
    starts, step = _steps(matrix)
    for start in starts:
        chunk = matrix[start : start + step]
        reader.read_into(chunk, goal[start : start + step])
        report(chunk.nbytes)


def chunks(raw: TensorBytes, report: Callable[[int], None]) -> Iterator[tuple[slice, Tensor]]:
    """Copy some rows at a time; yield their interval among all rows, and the copy.

    Args:
        report: callback that gets the number of bytes of each chunk before it is yielded; may raise
            to stop.
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
    """Return the first rows of a matrix's chunks, and the number of rows of each."""
    step = max(1, CHUNK_BYTES // max(1, matrix.shape[-1]))
    return range(0, len(matrix), step), step
