"""Facts of wheels: names, hashes and sizes, of files here or on a server without fetching them."""

from __future__ import annotations

import io
import re
import urllib.request
import zipfile
from pathlib import Path

from making.files import hash_of
from making.lock_file import LockedWheel

WAIT_S = 60.0
BLOCK = 64 << 10
WHOLE_SIZE = re.compile(r"bytes \d+-\d+/(\d+)")


class RemoteFile(io.RawIOBase):
    """A file on a server that is read where it is asked for, by requests of ranges.

    Raises:
        OSError: the server cannot be reached, or knows no ranges.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._at = url, 0
        self.size = self._ask(0, 0)[1]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self.size)
        if end <= self._at:
            return 0
        data = self._ask(self._at, end - 1)[0]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _ask(self, first: int, last: int) -> tuple[bytes, int]:
        """Return some bytes and the size of the file."""
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            match = WHOLE_SIZE.fullmatch(answer.headers.get("Content-Range", ""))
            if match is None:
                raise OSError(f"{self._url} is not sent in ranges")
            return answer.read(), int(match[1])


def unpacked_size(url: str) -> tuple[int, int]:
    """Return the size of a wheel on a server, and that of its files once it is unpacked.

    Raises:
        OSError: it cannot be read.
    """
    remote = RemoteFile(url)
    with io.BufferedReader(remote, BLOCK) as file, zipfile.ZipFile(file) as archive:
        return remote.size, sum(info.file_size for info in archive.infolist())


def folder_wheels(folder: Path) -> list[LockedWheel]:
    """Return all wheels of a folder.

    Raises:
        SystemExit: it has none, or two of the same distribution.
    """
    found: dict[str, LockedWheel] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in found:
            raise SystemExit(f"{folder} has two wheels of {name}.")
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        size = path.stat().st_size
        found[name] = LockedWheel(name, version, "", path.name, size, hash_of(path), unpacked)
    if not found:
        raise SystemExit(f"{folder} has no wheels.")
    return [*found.values()]
