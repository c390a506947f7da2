"""Matrices of all types in planes, with their exact values, for tests of kernels on GPUs."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.worker import Worker
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.layout import BLOCK, LAYOUTS, Extent, n_tiles
from tests.bench.random_blocks import random_tensor
from tests.helpers.planes import as_on_a_gpu

SMALL_TYPES = tuple(number for number in LAYOUTS if TYPES[number].block_size == BLOCK)
"""Types whose rows may have any number of blocks of 32."""


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix, or several of the same size.

    Attributes:
        number: number of the GGML type.
        planes: packed weights, uint8 (…, n_tile, tile_bytes).
        values: exact values of the weights, F32 (…, n_rows, n_columns).
        extent: columns of the file's rows that the matrix has.
    """

    number: int
    planes: Tensor
    values: Tensor
    extent: Extent

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.values.shape[-2]


@cache
def _worker() -> Worker:
    return Worker(1)


def matrix(
    number: int, n_rows: int, start: int, stop: int, *, n_matrix: int | None = None,
    std: float = 0.5, seed: int = 0, device: str = "cpu",
) -> Matrix:  # fmt: skip
    """Return random weights: columns `start` to `stop` of rows of a file.

    Args:
        number: number of the GGML type.
        n_matrix: number of matrices; None for one without that dimension.
        std: standard deviation of the weights.
    """
    block_size = TYPES[number].block_size
    width = -(-stop // block_size) * block_size
    rng = np.random.default_rng(seed + number)
    count = n_matrix or 1
    raw = random_tensor(number, (count * n_rows, width), std, rng).reshape(count, n_rows, -1)
    extent = Extent.of(start, stop)
    planes = torch.zeros(
        count, n_tiles(n_rows), extent.tile_bytes(LAYOUTS[number]), dtype=torch.uint8
    )
    for goal, rows in zip(planes, raw, strict=True):
        pack_rows(rows, number, extent, goal, 0, _worker())
    planes = as_on_a_gpu(planes, number, extent)
    values = dequantise(torch.from_numpy(raw), number)[..., start:stop]
    if n_matrix is None:
        planes, values = planes[0], values[0]
    return Matrix(number, planes.to(device), values.contiguous().to(device), extent)
