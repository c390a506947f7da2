"""One file of a model, open for reads that fail with a sentence."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path

from engine.errors import InvalidGGUF, ModelFileError

Stamp = tuple[str, int, int]
"""Path of a file, its size in bytes and the time of its last change in ns."""


class OpenPart:
    """A file of a model, open for reading at any place, by several threads.

    Reads copy into memory of the caller. If another program cuts the file short, or its drive is
    gone, a read raises an error, where access to a memory map would end the process (SIGBUS).

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        n_bytes: size of the file when it was opened.

    Raises:
        ModelFileError: there is no such file, or it may not be read.
        InvalidGGUF: it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # before it is opened: opening a pipe would wait for a writer
            _check_mode(path, path.stat().st_mode)
            self._file = path.open("rb", 0)
        except FileNotFoundError:
            message = f"There is no file {path}."
            raise ModelFileError(path, message, "It may have been moved or deleted.") from None
        except PermissionError:
            message = f"You are not allowed to read {path}."
            raise ModelFileError(path, message, "Change the file's permissions.") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelFileError(path, f"{path} cannot be read: {reason}.") from None
        self._finalizer = weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        self._opened = os.fstat(self._file.fileno())
        self.n_bytes = self._opened.st_size
        if self.n_bytes == 0:
            self.close()
            raise InvalidGGUF(path, "it is empty")

    @property
    def stamp(self) -> Stamp:
        """Stamp of the file when it was opened, whatever lies under its path by now."""
        return str(self.path), self.n_bytes, self._opened.st_mtime_ns

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, for reads by compiled code.

        Raises:
            ValueError: the file is closed.
        """
        if self._file.closed:
            raise ValueError(f"{self.path.name} is closed")
        return self._file.fileno()

    def read_into(self, goal: memoryview, offset: int) -> None:
        """Fill memory with the bytes from `offset` on.

        Args:
            goal: writable memory of bytes, one after another.

        Raises:
            ModelFileError: the file has become shorter, or its drive fails.
            ValueError: the file is closed.
        """
        while goal:
            n_bytes = self._read_some(goal, offset)
            if n_bytes == 0:
                raise ModelFileError(
                    self.path,
                    f"{self.path.name} has become shorter while it was read.",
                    "Copy or download it again.",
                )
            goal, offset = goal[n_bytes:], offset + n_bytes

    def _read_some(self, goal: memoryview, offset: int) -> int:
        """Fill some of the memory; return the number of bytes, 0 at the end of the file."""
        descriptor = self.descriptor
        try:
            if hasattr(os, "preadv"):
                return os.preadv(descriptor, [goal], offset)
            with self._lock:  # Windows has one position for all threads
                self._file.seek(offset)
                return self._file.readinto(goal) or 0
        except OSError as error:
            raise ModelFileError(
                self.path,
                f"{self.path.name} cannot be read any more: {error.strerror or error}.",
                "Check the drive that it is on, and the connection to it.",
            ) from None

    def check_unchanged(self) -> None:
        """Check that nobody has written to the file since it was opened.

        Raises:
            ModelFileError: somebody has, so that what was read may not fit together.
        """
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise ModelFileError(
                self.path,
                f"{self.path.name} was changed while it was read.",
                "Load it again once no other program writes to it.",
            )

    def close(self) -> None:
        """Close the file; one that nobody uses any more is closed anyway."""
        self._finalizer()


def _check_mode(path: Path, mode: int) -> None:
    """Check that a path is that of a regular file.

    Raises:
        ModelFileError: it is something else.
    """
    if stat.S_ISDIR(mode):
        raise ModelFileError(path, f"{path} is a folder.", "Pick a .gguf file in it.")
    if not stat.S_ISREG(mode):
        raise ModelFileError(path, f"{path} is not a regular file.", "Pick a .gguf file.")
