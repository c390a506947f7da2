"""Bytes of a tensor in memory, for what reads them from a file."""

import weakref
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from engine.formats.gguf.tensor_bytes import OpenPart, TensorBytes


class MemoryPart(OpenPart):
    """A file whose bytes are in memory, and in a file once compiled code wants to read it."""

    def __init__(self, data: np.ndarray) -> None:
        self.path = Path("memory.gguf")
        self.n_bytes = data.nbytes
        self._data = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    @property
    def descriptor(self) -> int:
        return self._copy.fileno()

    @cached_property
    def _copy(self) -> IO[bytes]:
        copy = TemporaryFile(buffering=0)  # noqa: SIM115  # closed below
        copy.write(self._data)
        weakref.finalize(self, copy.close)
        return copy

    def read_into(self, goal: memoryview, offset: int) -> None:
        goal[:] = self._data[offset : offset + len(goal)]


def stored(data: np.ndarray) -> TensorBytes:
    """Return bytes (…, row_bytes) as a file would have them."""
    return TensorBytes.of(MemoryPart(data), 0, data.shape)
