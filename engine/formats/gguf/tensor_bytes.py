"""Bytes of a tensor in a file, which can be sliced before anything is read."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from engine.errors import InvalidGGUF, ModelFileError, Sentence, reason_of

Stamp = tuple[str, int, int]
"""Path of a file, its size in bytes and its modification time in ns."""


class OpenPart:
    """A model file, open for reading at any offset. Thread-safe.

    Reads copy into the caller's memory. If another program truncates the file, or its drive is
    gone, a read raises an error, whereas access to a memory map would kill the process (SIGBUS).

    Attributes:
        n_bytes: size of the file when it was opened.

    Raises:
        ModelFileError: the file does not exist, or reading it is not permitted.
        InvalidGGUF: the file is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # checked before opening, because opening a pipe would wait for a writer
            _check_mode(path, path.stat().st_mode)
            self._file = path.open("rb", 0)
        except FileNotFoundError:
            raise ModelFileError(
                path,
                "There is no file {path}.",
                "It may have been moved or deleted.",
                path=str(path),
            ) from None
        except PermissionError:
            raise ModelFileError(
                path,
                "You are not allowed to read {path}.",
                "Change the file's permissions.",
                path=str(path),
            ) from None
        except (OSError, ValueError) as error:
            reason = Sentence(getattr(error, "strerror", None) or str(error))
            raise ModelFileError(
                path, "{path} cannot be read: {problem}.", path=str(path), problem=reason
            ) from None
        self._finalizer = weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        self._opened = os.fstat(self._file.fileno())
        self.n_bytes = self._opened.st_size
        if self.n_bytes == 0:
            self.close()
            raise InvalidGGUF(path, "it is empty")

    @property
    def stamp(self) -> Stamp:
        """Stamp of the file when it was opened, even if it has been replaced since."""
        return str(self.path), self.n_bytes, self._opened.st_mtime_ns

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, for use by compiled code.

        Raises:
            ValueError: the file is closed.
        """
        if self._file.closed:
            raise ValueError(f"{self.path.name} is closed")
        return self._file.fileno()

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill contiguous memory with the bytes from `offset` on.

        Raises:
            ModelFileError: the file has become shorter, or its drive failed.
            ValueError: the file is closed.
        """
        while target:
            n_bytes = self._read_some(target, offset)
            if n_bytes == 0:
                raise ModelFileError(
                    self.path,
                    "{file} became shorter while it was being read.",
                    "Copy or download it again.",
                    file=self.path.name,
                )
            target, offset = target[n_bytes:], offset + n_bytes

    def _read_some(self, target: memoryview, offset: int) -> int:
        # 0 bytes at the end of the file
        descriptor = self.descriptor
        try:
            if hasattr(os, "preadv"):
                return os.preadv(descriptor, [target], offset)
            with self._lock:  # Windows has one position for all threads
                self._file.seek(offset)
                return self._file.readinto(target) or 0
        except OSError as error:
            raise ModelFileError(
                self.path,
                "{path} can no longer be read: {problem}.",
                "Check the drive it is on and the drive's connection.",
                path=self.path.name,
                problem=reason_of(error),
            ) from None

    def check_unchanged(self) -> None:
        """Raise ModelFileError if the file has been modified since it was opened."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise ModelFileError(
                self.path,
                "{file} was changed while it was being read.",
                "Load it again once no other program is writing to it.",
                file=self.path.name,
            )

    def close(self) -> None:
        """Close the file; an unreferenced file is closed anyway."""
        self._finalizer()


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise ModelFileError(
            path, "{path} is a folder.", "Pick a .gguf file in it.", path=str(path)
        )
    if not stat.S_ISREG(mode):
        raise ModelFileError(
            path, "{path} is not a regular file.", "Pick a .gguf file.", path=str(path)
        )


LONG_ROW = 32 << 10
"""Smallest partial row that is read separately, in bytes; for shorter ones, whole rows are read."""

SPAN_BYTES = 256 << 10
"""Bytes in whole rows that are read at a time to extract columns; they fit into caches."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of a tensor, or of a part of it, in a file.

    Slicing it like an array reads nothing; `read` and `read_into` do.

    Attributes:
        shape: sizes of the axes, slowest first; the last is the number of bytes per row.
        strides: bytes in the file from one index to the next, per axis.
    """

    part: OpenPart
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, part: OpenPart, offset: int, shape: Sequence[int]) -> TensorBytes:
        """Return the bytes of a whole tensor, contiguous from `offset` on."""
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(part, offset, tuple(shape), strides)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int | slice | tuple[int | slice, ...]) -> TensorBytes:
        """Return a part: an index drops its axis, a slice (without a step) cuts it."""
        given = at if isinstance(at, tuple) else (at,)
        if len(given) > self.ndim:
            raise IndexError(f"{len(given)} indices for {self.ndim} axes")
        offset, shape, strides = self.offset, [], []
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            index = given[axis] if axis < len(given) else slice(None)
            if isinstance(index, slice):
                start, stop, step = index.indices(size)
                if step != 1:
                    raise IndexError("only neighbouring bytes can be taken")
                shape.append(max(0, stop - start))
                strides.append(stride)
            else:
                start = range(size)[index]
            offset += start * stride
        return TensorBytes(self.part, offset, tuple(shape), tuple(strides))

    def flat(self) -> TensorBytes:
        """Return the same bytes along one axis; raise ValueError if they are not contiguous."""
        if not self.is_contiguous:
            raise ValueError(f"a part {self.shape} of a tensor has gaps")
        return TensorBytes(self.part, self.offset, (self.nbytes,), (1,))

    @property
    def is_even(self) -> bool:
        """Whether the rows of all matrices (n, n_rows, row_bytes) are evenly spaced."""
        return len(self) == 1 or self.strides[0] == self.shape[1] * self.strides[1]

    def tall(self) -> TensorBytes:
        """Return evenly spaced matrices (n, n_rows, row_bytes) as a single one with all rows."""
        n, n_rows, row_bytes = self.shape
        return TensorBytes(self.part, self.offset, (n * n_rows, row_bytes), self.strides[1:])

    def stack(self) -> TensorBytes:
        """Return the same bytes as matrices, (n, n_rows, row_bytes).

        Raises:
            ValueError: the matrices are not evenly spaced.
        """
        shape = (*(1,) * (3 - self.ndim), *self.shape)
        strides = (*(0,) * (3 - self.ndim), *self.strides)
        for axis in range(len(shape) - 3):
            if strides[axis] != shape[axis + 1] * strides[axis + 1]:
                raise ValueError(f"the matrices of a part {shape} of a tensor are uneven")
        shape = (prod(shape[:-2]), *shape[-2:])
        return TensorBytes(self.part, self.offset, shape, strides[-3:])

    def read(self) -> NDArray[np.uint8]:
        """Read the bytes into new memory; see `read_into`."""
        target = np.empty(self.shape, np.uint8)
        self.read_into(target)
        return target

    def read_into(self, target: NDArray[np.uint8]) -> None:
        """Read the bytes into an array of the same shape; for errors, see `OpenPart.read_into`."""
        if target.shape != self.shape:
            raise ValueError(f"{self.shape} of a tensor does not fit into {target.shape}")
        if not self.nbytes:
            return
        if target.flags.c_contiguous and self.is_contiguous:
            self.part.read_into(target.reshape(-1).data, self.offset)
        elif self.ndim == 2 and self.strides[1] == 1 and self.shape[1] < LONG_ROW:
            self._read_columns(target)
        else:
            for index in range(len(self)):
                self[index].read_into(target[index])

    @property
    def is_contiguous(self) -> bool:
        """Whether the bytes are contiguous in the file."""
        n_bytes = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != n_bytes:
                return False
            n_bytes *= size
        return True

    def _read_columns(self, target: NDArray[np.uint8]) -> None:
        # whole rows are read first, and the columns are copied from them
        (n_rows, n_columns), stride = self.shape, self.strides[0]
        step = max(1, min(n_rows, SPAN_BYTES // stride))
        span = np.empty((step - 1) * stride + n_columns, np.uint8)
        for start in range(0, n_rows, step):
            n = min(step, n_rows - start)
            some = span[: (n - 1) * stride + n_columns]
            self.part.read_into(some.data, self.offset + start * stride)
            target[start : start + n] = as_strided(some, (n, n_columns), (stride, 1))
