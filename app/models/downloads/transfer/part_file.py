"""A file that is on its way: its bytes in ".part", and what is known of them in a sidecar.

The sidecar is written after the bytes that it names are on the disk, so that after a power cut it
names too few of them at worst.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from app.core.translation import tr
from app.core.units import decimal
from app.models.downloads.transfer.source import RemoteFile
from engine import Cancelled, EngineError, replace_json

Range = tuple[int, int]
"""First byte, and the one behind the last."""

Ranges = tuple[Range, ...]
"""Ranges in order that neither touch nor overlap."""


def merged(ranges: Iterable[Range]) -> Ranges:
    """Return the same bytes in as few ranges as possible, in order."""
    found: list[Range] = []
    for start, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def gaps(ranges: Ranges, start: int, end: int) -> Ranges:
    """Return what `ranges` leave of the bytes from `start` to `end`."""
    found = []
    for first, behind in ranges:
        if behind <= start or first >= end:
            continue
        if first > start:
            found.append((start, first))
        start = behind
    if start < end:
        found.append((start, end))
    return tuple(found)


def n_bytes(ranges: Iterable[Range]) -> int:
    """Return the number of bytes in all."""
    return sum(end - start for start, end in ranges)


SPARE = 64 << 20
"""Bytes of a disk that a download leaves free."""

MODEL_MAGIC = b"GGUF"
HASH_BYTES = 1 << 20
MAX_SIDECAR = 1 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NoRoom(EngineError):
    """Error of a disk that is too full for a file."""


class WrongBytes(EngineError):
    """Error of a file that is not what its server has announced; nothing of it is kept."""


class PartFile:
    """The part of a file that has arrived; any thread may write to it.

    Args:
        path: place of the whole file.
        file: what is being fetched.
        magic: bytes with which it begins; those of a model if none are given.
    """

    def __init__(self, path: Path, file: RemoteFile, magic: bytes = MODEL_MAGIC) -> None:
        self.path, self.file = path, file
        self._magic = magic
        self.part = path.with_name(f"{path.name}.part")
        self.sidecar = path.with_name(f"{path.name}.part.json")
        self._ranges: Ranges = ()
        self._lock = threading.Lock()
        self._goal: BinaryIO | None = None

    @property
    def n_done(self) -> int:
        """Number of bytes that have arrived."""
        return n_bytes(self._ranges)

    @property
    def is_complete(self) -> bool:
        return self.n_done == self.file.n_bytes

    def missing(self, start: int = 0, end: int | None = None) -> Ranges:
        """Return the ranges that have not arrived, of the whole file or a part of it."""
        return gaps(self._ranges, start, self.file.n_bytes if end is None else end)

    def open(self) -> None:
        """Go on with what has arrived of the same file, or begin anew.

        Raises:
            EngineError: there is another file, or no room, or the folder cannot be written.
        """
        if self.path.exists():
            raise EngineError(
                tr("There is another file {path}.").format(path=self.path),
                tr("Move it away, or pick another folder."),
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._ranges = self._arrived()
            self._check_room()
            self._goal = self.part.open("r+b" if self._ranges else "wb", 0)
        except OSError as error:
            raise self._disk_error(error) from None

    def look(self) -> None:
        """Find out what has arrived, without going on."""
        with suppress(OSError):
            self._ranges = self._arrived()

    def write(self, data: bytes, start: int) -> None:
        """Write bytes at a place and note that they have arrived.

        Raises:
            Cancelled: the file was closed meanwhile.
            NoRoom: the disk is full.
            EngineError: the disk fails.
        """
        with self._lock:
            if self._goal is None:
                raise Cancelled("The download")
            try:
                self._goal.seek(start)
                view = memoryview(data)
                while view:
                    view = view[self._goal.write(view) :]
            except OSError as error:
                raise self._disk_error(error) from None
            self._ranges = merged((*self._ranges, (start, start + len(data))))

    def save(self) -> None:
        """Bring all bytes to the disk, then name them in the sidecar.

        Raises:
            EngineError: the disk is full or fails.
        """
        with self._lock:
            if self._goal is None:
                return
            ranges = self._ranges
            try:
                os.fsync(self._goal.fileno())
                document = asdict(self.file) | {"finished": ranges}
                replace_json(self.sidecar, document)
            except OSError as error:
                raise self._disk_error(error) from None

    def close(self) -> None:
        """Take no more bytes; what has arrived stays."""
        with self._lock:
            goal, self._goal = self._goal, None
            if goal is not None:
                goal.close()

    def discard(self) -> None:
        """Delete all that has arrived."""
        self.close()
        self._ranges = ()
        for path in (self.part, self.sidecar):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def finish(self, is_stopped: Callable[[], bool], told: Callable[[int], None]) -> None:
        """Compare the bytes with their hash and give the file its name.

        Args:
            told: is called with the number of bytes that were compared.

        Raises:
            Cancelled: `is_stopped` while comparing.
            WrongBytes: they are others; they are deleted.
            EngineError: the file cannot be read or renamed.
        """
        self.close()
        try:
            found = _hash(self.part, self._magic, is_stopped, told)
            if not found and self._magic == MODEL_MAGIC:
                self.discard()
                raise WrongBytes(
                    tr("{name} is no model: it does not begin with “GGUF”.").format(
                        name=self.path.name
                    ),
                    tr("What had arrived was deleted."),
                )
            is_other = self.part.stat().st_size != self.file.n_bytes
            if is_other or (self.file.sha256 and found != self.file.sha256):
                self.discard()
                raise WrongBytes(
                    tr("{name} is damaged: it is not what its server has announced.").format(
                        name=self.path.name
                    ),
                    tr("What had arrived was deleted. Download it again."),
                )
            if self.path.exists():  # somebody has put it there meanwhile
                raise EngineError(
                    tr("There is another file {path}.").format(path=self.path), tr("Move it away.")
                )
            self.part.replace(self.path)
            self.sidecar.unlink(missing_ok=True)
        except OSError as error:
            raise self._disk_error(error) from None

    def is_whole_already(
        self, is_stopped: Callable[[], bool], told: Callable[[int, bool], None]
    ) -> bool:
        """Return whether the file is there, with the right bytes.

        Raises:
            Cancelled: `is_stopped` while comparing.
            EngineError: the file cannot be read.
        """
        try:
            found = _hash(self.path, self._magic, is_stopped, lambda n: told(n, True))
        except OSError as error:
            raise self._disk_error(error) from None
        return bool(self.file.sha256) and found == self.file.sha256

    def _arrived(self) -> Ranges:
        """Return the ranges that the sidecar names; none if it is of another file or damaged."""
        found = read_sidecar(self.sidecar)
        if found is None or not found[0].is_same(self.file) or not self.part.is_file():
            return ()
        end = min(self.part.stat().st_size, self.file.n_bytes)
        return gaps(gaps(merged(found[1]), 0, end), 0, end)

    def _check_room(self) -> None:
        wanted = self.file.n_bytes - self.n_done
        free = shutil.disk_usage(self.path.parent).free - SPARE
        if wanted > free:
            raise NoRoom(
                tr("{folder} has {free} GB free, but {wanted} GB are missing of {name}.").format(
                    folder=self.path.parent,
                    free=decimal(f"{max(free, 0) / 1e9:.1f}"),
                    wanted=decimal(f"{wanted / 1e9:.1f}"),
                    name=self.path.name,
                ),
                tr("Delete something, or pick a folder on another disk; then resume."),
            )

    def _disk_error(self, error: OSError) -> EngineError:
        if error.errno in FULL:
            return NoRoom(
                tr("The disk is full: {name} has arrived only in part.").format(
                    name=self.path.name
                ),
                tr("Make room, then resume; what has arrived is kept."),
            )
        why = error.strerror or error
        return EngineError(
            tr("{path} cannot be written: {why}.").format(path=self.path, why=why),
            tr("Pick another folder."),
        )


def _hash(
    path: Path, magic: bytes, is_stopped: Callable[[], bool], told: Callable[[int], None]
) -> str:
    """Return the SHA-256 of a file; "" if it does not begin with `magic`.

    Args:
        told: is called with the number of bytes that were read.

    Raises:
        Cancelled: `is_stopped`.
        OSError: the file cannot be read.
    """
    found, n_read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            if is_stopped():
                raise Cancelled("The download")
            if n_read == 0 and not block.startswith(magic):
                return ""
            found.update(block)
            n_read += len(block)
            told(n_read)
    return found.hexdigest() if n_read else ""


def read_sidecar(path: Path) -> tuple[RemoteFile, tuple[Range, ...]] | None:
    """Return the file that a sidecar tells of and its finished ranges; None if it is damaged."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_SIDECAR))
        finished = tuple((int(start), int(end)) for start, end in data.pop("finished"))
        return RemoteFile(**data), finished
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
