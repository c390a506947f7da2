"""Lock files for engine packs: wheels with their addresses, sizes and hashes.

They follow PEP 751, with the extra table "tool.tandem"; `packaging/lock` writes them.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.core.translation import tr
from app.models.downloads.transfer.source import RemoteFile, safe_name
from engine import EngineError

MAX_BYTES = 4 << 20
HASH = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
VERSION = re.compile(r"[0-9a-zA-Z.!+]+")
MACOS = re.compile(r"[.-]macosx_(\d+)_")
HOSTS = ("files.pythonhosted.org", "download.pytorch.org")  # servers in a release's locks

SYSTEMS = {"linux": "linux", "win32": "windows", "darwin": "macos"}
MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}

WRONG = (EngineError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors that reading an invalid lock can raise."""


class BadLock(EngineError):
    """Error raised if a lock file is invalid."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel; its file has no address if the user must provide it."""

    name: str
    version: str
    file: RemoteFile


@dataclass(frozen=True, slots=True)
class Lock:
    """The wheels in one pack.

    Attributes:
        backend: kind of PyTorch: "cpu", "cuda13", "cuda12" or "rocm".
        system: platform, for example "linux-x86_64".
        python: Python version, for example "3.11".
        unpacked_bytes: size on disk.
        digest: SHA-256 of the lock file.
    """

    backend: str
    system: str
    python: str
    wheels: tuple[Wheel, ...]
    unpacked_bytes: int
    digest: str

    @property
    def n_bytes(self) -> int:
        """Download size in bytes."""
        return sum(wheel.file.n_bytes for wheel in self.wheels)

    @property
    def version(self) -> str:
        """PyTorch version."""
        return next((wheel.version for wheel in self.wheels if wheel.name == "torch"), "")

    @property
    def is_for_here(self) -> bool:
        """Whether the lock is for this system and Python version."""
        return (self.system, self.python) == (this_system(), this_python())

    @property
    def least_macos(self) -> int:
        """Minimum macOS version that the wheels require; 0 for other systems."""
        names = (wheel.file.name for wheel in self.wheels)
        needed = [min(map(int, versions)) for name in names if (versions := MACOS.findall(name))]
        return max(needed, default=0)

    @property
    def is_complete(self) -> bool:
        """Whether each wheel has an address."""
        return all(wheel.file.url for wheel in self.wheels)


def this_system() -> str:
    """Return this system's name in locks, for example "linux-x86_64"."""
    machine = platform.machine().lower()
    return f"{SYSTEMS.get(sys.platform, sys.platform)}-{MACHINES.get(machine, machine)}"


def this_python() -> str:
    """Return this Python's version in locks, for example "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def locks_dir() -> Path:
    """Return the folder with the bundled locks."""
    return Path(__file__).resolve().parents[3] / "resources" / "engine"


def find_locks(folder: Path | None = None) -> tuple[Lock, ...]:
    """Return the locks for this system in a folder, by default the bundled locks."""
    paths = sorted((folder or locks_dir()).glob("pylock.*.toml"))
    return tuple(lock for lock in map(read_lock, paths) if lock.is_for_here)


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        BadLock: the file cannot be read or is invalid.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadLock(tr("{path} is too large for a lock file.").format(path=path))
        data = path.read_bytes()
    except OSError as error:
        raise BadLock(
            tr("{path} cannot be read: {why}.").format(path=path, why=error.strerror or error)
        ) from None
    try:
        document = tomllib.loads(data.decode())
        own = document["tool"]["tandem"]
        lock = Lock(
            backend=_text(own["backend"], NAME),
            system=_text(own["system"]),
            python=_text(own["python"], VERSION),
            wheels=tuple(_wheel(package) for package in document["packages"]),
            unpacked_bytes=_size(own["unpacked-bytes"]),
            digest=hashlib.sha256(data).hexdigest(),
        )
        if not lock.version:
            raise ValueError("torch is missing")
        return lock
    except WRONG as error:
        raise BadLock(
            tr("{path} is not an engine lock file: {why}.").format(path=path, why=error),
            tr("Create it with packaging/lock."),
        ) from None


def _wheel(package: dict[str, Any]) -> Wheel:
    """Return a package entry's only wheel.

    Raises:
        ValueError: the entry has no wheel, several, or an invalid wheel.
    """
    name, version = _text(package["name"], NAME), _text(package["version"], VERSION)
    (found,) = package["wheels"]
    url = str(found.get("url", ""))
    parts = urlsplit(url)
    if url and parts.scheme not in ("https", "http"):
        raise ValueError(f"{name} has an unexpected address: {url[:80]}")
    file_name = str(found.get("name") or found.get("path") or parts.path.rpartition("/")[2])
    file_name = file_name.replace("%2B", "+").replace("%2b", "+")
    if not file_name.endswith(".whl"):
        raise ValueError(f"{name} has no wheel")
    digest = _text(found["hashes"]["sha256"], HASH)
    file = RemoteFile(url, safe_name(file_name), _size(found["size"]), digest, parts.netloc)
    return Wheel(name, version, file)


def _text(value: object, pattern: re.Pattern[str] = re.compile(r"[\w.-]+")) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"unexpected {str(value)[:80]!r}")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"unexpected size {str(value)[:80]!r}")
    return value
