"""A partial download: a ".part" file with the bytes, and a sidecar that lists their ranges.

The sidecar is written after the bytes are on disk, so that it never lists missing bytes, even after
a power failure.
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

Range = tuple[int, int]  # start and end (exclusive)

Ranges = tuple[Range, ...]  # sorted ranges that neither touch nor overlap


def merged(ranges: Iterable[Range]) -> Ranges:
    """Return the union of ranges."""
    result: list[Range] = []
    for start, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return tuple(result)


def gaps(ranges: Ranges, start: int, end: int) -> Ranges:
    """Return the parts of `start` to `end` that `ranges` do not cover."""
    result = []
    for first, last in ranges:
        if last <= start or first >= end:
            continue
        if first > start:
            result.append((start, first))
        start = last
    if start < end:
        result.append((start, end))
    return tuple(result)


def n_bytes(ranges: Iterable[Range]) -> int:
    """Return the total number of bytes."""
    return sum(end - start for start, end in ranges)


SPARE = 64 << 20  # bytes that a download leaves free on disk

MODEL_MAGIC = b"GGUF"
HASH_BYTES = 1 << 20
MAX_SIDECAR = 1 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NoRoom(EngineError):
    """Error raised if the disk has too little space for a file."""


class WrongBytes(EngineError):
    """Error raised after deleting a file with the wrong size, checksum or format."""


class PartFile:
    """A partial download; thread-safe.

    Args:
        path: path of the complete file.
        magic: the first bytes of a valid file.
    """

    def __init__(self, path: Path, file: RemoteFile, magic: bytes = MODEL_MAGIC) -> None:
        self.path, self.file = path, file
        self._magic = magic
        self.part = path.with_name(f"{path.name}.part")
        self.sidecar = path.with_name(f"{path.name}.part.json")
        self._ranges: Ranges = ()
        self._lock = threading.Lock()
        self._output: BinaryIO | None = None

    @property
    def n_done(self) -> int:
        """Number of bytes on disk."""
        return n_bytes(self._ranges)

    @property
    def is_complete(self) -> bool:
        return self.n_done == self.file.n_bytes

    def missing(self, start: int = 0, end: int | None = None) -> Ranges:
        """Return the missing ranges in the whole file or in a part of it."""
        return gaps(self._ranges, start, self.file.n_bytes if end is None else end)

    def open(self) -> None:
        """Resume a partial download of the same file, or start a new one.

        Raises:
            EngineError: the file exists, the disk is full, or it cannot be written to.
        """
        if self.path.exists():
            raise EngineError(
                tr("{path} already exists.").format(path=self.path),
                tr("Move it, or choose another folder."),
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._ranges = self._arrived()
            self._check_room()
            self._output = self.part.open("r+b" if self._ranges else "wb", 0)
        except OSError as error:
            raise self._disk_error(error) from None

    def look(self) -> None:
        """Read the sidecar without opening the file."""
        with suppress(OSError):
            self._ranges = self._arrived()

    def write(self, data: bytes, start: int) -> None:
        """Write bytes at `start`.

        Raises:
            Cancelled: the file was closed.
            NoRoom: the disk is full.
            EngineError: a disk error occurred.
        """
        with self._lock:
            if self._output is None:
                raise Cancelled("The download")
            try:
                self._output.seek(start)
                view = memoryview(data)
                while view:
                    view = view[self._output.write(view) :]
            except OSError as error:
                raise self._disk_error(error) from None
            self._ranges = merged((*self._ranges, (start, start + len(data))))

    def save(self) -> None:
        """Flush all bytes to disk, then write the sidecar.

        Raises:
            EngineError: the disk is full, or a disk error occurred.
        """
        with self._lock:
            if self._output is None:
                return
            ranges = self._ranges
            try:
                os.fsync(self._output.fileno())
                replace_json(self.sidecar, asdict(self.file) | {"finished": ranges})
            except OSError as error:
                raise self._disk_error(error) from None

    def close(self) -> None:
        """Close the file; further writes fail."""
        with self._lock:
            output, self._output = self._output, None
            if output is not None:
                output.close()

    def discard(self) -> None:
        """Delete the partial download."""
        self.close()
        self._ranges = ()
        for path in (self.part, self.sidecar):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def finish(self, is_stopped: Callable[[], bool], report: Callable[[int], None]) -> None:
        """Verify the bytes and rename the file.

        Args:
            report: receives the number of verified bytes.

        Raises:
            Cancelled: `is_stopped` returned True.
            WrongBytes: the bytes are wrong; the download was deleted.
            EngineError: the file cannot be read or renamed.
        """
        self.close()
        try:
            sha256 = file_hash(self.part, self._magic, is_stopped, report)
            if not sha256 and self._magic == MODEL_MAGIC:
                self.discard()
                raise WrongBytes(
                    tr("{name} is not a model: it does not start with “GGUF”.").format(
                        name=self.path.name
                    ),
                    tr("The partial download was deleted."),
                )
            is_other = self.part.stat().st_size != self.file.n_bytes
            if is_other or (self.file.sha256 and sha256 != self.file.sha256):
                self.discard()
                raise WrongBytes(
                    tr("{name} is corrupted: its size or checksum does not match.").format(
                        name=self.path.name
                    ),
                    tr("The partial download was deleted. Download it again."),
                )
            if self.path.exists():  # created by another program since `open`
                raise EngineError(
                    tr("{path} already exists.").format(path=self.path), tr("Move it.")
                )
            self.part.replace(self.path)
            self.sidecar.unlink(missing_ok=True)
        except OSError as error:
            raise self._disk_error(error) from None

    def is_verified(
        self, is_stopped: Callable[[], bool], report: Callable[[int, bool], None]
    ) -> bool:
        """Return whether the complete file has the expected checksum.

        Raises:
            Cancelled: `is_stopped` returned True.
            EngineError: the file cannot be read.
        """
        try:
            sha256 = file_hash(self.path, self._magic, is_stopped, lambda n: report(n, True))
        except OSError as error:
            raise self._disk_error(error) from None
        return bool(self.file.sha256) and sha256 == self.file.sha256

    def _arrived(self) -> Ranges:
        """Return the ranges in the sidecar; none if it is damaged or belongs to another file."""
        sidecar = read_sidecar(self.sidecar)
        if sidecar is None or not sidecar[0].is_same(self.file) or not self.part.is_file():
            return ()
        end = min(self.part.stat().st_size, self.file.n_bytes)
        return gaps(gaps(merged(sidecar[1]), 0, end), 0, end)

    def _check_room(self) -> None:
        needed = self.file.n_bytes - self.n_done
        free = shutil.disk_usage(self.path.parent).free - SPARE
        if needed > free:
            raise NoRoom(
                tr("{folder} has {free} GB free, but {name} needs {wanted} GB more.").format(
                    folder=self.path.parent,
                    free=decimal(f"{max(free, 0) / 1e9:.1f}"),
                    wanted=decimal(f"{needed / 1e9:.1f}"),
                    name=self.path.name,
                ),
                tr("Free some space or choose a folder on another disk, then resume."),
            )

    def _disk_error(self, error: OSError) -> EngineError:
        if error.errno in FULL:
            return NoRoom(
                tr("The disk is full: {name} is incomplete.").format(name=self.path.name),
                tr("Free some space, then resume; the partial download is kept."),
            )
        why = error.strerror or error
        return EngineError(
            tr("{path} cannot be written: {why}.").format(path=self.path, why=why),
            tr("Choose another folder."),
        )


def file_hash(
    path: Path, magic: bytes, is_stopped: Callable[[], bool], report: Callable[[int], None]
) -> str:
    """Return a file's SHA-256; "" if it does not start with `magic`.

    Raises:
        Cancelled: `is_stopped` returned True.
        OSError: the file cannot be read.
    """
    sha256, n_read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            if is_stopped():
                raise Cancelled("The download")
            if n_read == 0 and not block.startswith(magic):
                return ""
            sha256.update(block)
            n_read += len(block)
            report(n_read)
    return sha256.hexdigest() if n_read else ""


def read_sidecar(path: Path) -> tuple[RemoteFile, tuple[Range, ...]] | None:
    """Return a sidecar's remote file and finished ranges, or None if it is damaged."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_SIDECAR))
        finished = tuple((int(start), int(end)) for start, end in data.pop("finished"))
        return RemoteFile(**data), finished
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
