"""Bytes of a tensor in memory, for what reads them from a file."""

from pathlib import Path

import numpy as np

from engine.gguf.open_part import OpenPart
from engine.gguf.tensor_bytes import TensorBytes


class MemoryPart(OpenPart):
    """A file whose bytes are in memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.path = Path("memory.gguf")
        self.n_bytes = data.nbytes
        self._data = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def read_into(self, goal: memoryview, offset: int) -> None:
        goal[:] = self._data[offset : offset + len(goal)]


def stored(data: np.ndarray) -> TensorBytes:
    """Return bytes (…, row_bytes) as a file would have them."""
    return TensorBytes.of(MemoryPart(data), 0, data.shape)
