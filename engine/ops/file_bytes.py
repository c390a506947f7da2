"""Chunked copies of a file's bytes into memory, so that a load can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 8 << 20
"""Bytes of a chunk; cancelling and progress take effect between chunks."""


def copied(raw: Bytes, report: Callable[[int], None]) -> Tensor:
    """Copy bytes (…, row_bytes) of the file into memory of their own.

    Args:
        report: callback that gets the number of bytes read; may raise to stop.
    """
    rows = torch.empty(prod(raw.shape[:-1]), raw.shape[-1], dtype=torch.uint8)
    for part, chunk in chunks(raw, report):
        rows[part] = chunk
    return rows.view(raw.shape)


def chunks(raw: Bytes, report: Callable[[int], None]) -> Iterator[tuple[slice, Tensor]]:
    """Copy some rows at a time; yield their interval among all rows, and the copy.

    Args:
        report: callback that gets the number of bytes of each chunk before it is yielded; may raise
            to stop.
    """
    n_columns = raw.shape[-1]
    step = max(1, CHUNK_BYTES // n_columns)
    done = 0
    for matrix in raw.reshape(-1, *raw.shape[-2:]) if raw.ndim > 1 else raw[None, None]:
        for start in range(0, len(matrix), step):
            chunk = torch.from_numpy(matrix[start : start + step].copy())
            report(chunk.nbytes)
            yield slice(done, done + len(chunk)), chunk
            done += len(chunk)
