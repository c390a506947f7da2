"""The text of a lock file, as PEP 751 has it; what that does not know stands in tool.tandem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Locked(Protocol):
    """What a lock file is for."""

    name: str
    python: str
    marker: str

    @property
    def backend(self) -> str: ...

    @property
    def system(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LockedWheel:
    """A wheel in a lock file.

    Attributes:
        url: address; "" for one of a folder.
        file: file name where there is no address.
        size: bytes.
        unpacked: bytes once it is unpacked.
    """

    name: str
    version: str
    url: str
    file: str
    size: int
    sha256: str
    unpacked: int


def lock_text(source: Locked, wheels: Sequence[LockedWheel]) -> str:
    """Return the lock file of a pack."""
    unpacked = sum(wheel.unpacked for wheel in wheels)
    lines = [
        f"# Engine pack {source.name}, written by packaging/lock.",
        'lock-version = "1.0"',
        f'environments = ["{source.marker}"]',
        f'requires-python = "=={source.python}.*"',
        'created-by = "tandem"',
        *(line for wheel in sorted(wheels, key=lambda one: one.name) for line in _entry(wheel)),
        "",
        "[tool.tandem]",
        f'backend = "{source.backend}"',
        f'system = "{source.system}"',
        f'python = "{source.python}"',
        f"unpacked-bytes = {unpacked}",
    ]
    return "\n".join(lines) + "\n"


def _entry(wheel: LockedWheel) -> list[str]:
    place = f'url = "{wheel.url}"' if wheel.url else f'path = "{wheel.file}"'
    return [
        "",
        "[[packages]]",
        f'name = "{wheel.name}"',
        f'version = "{wheel.version}"',
        "[[packages.wheels]]",
        place,
        f"size = {wheel.size}",
        f'hashes = {{ sha256 = "{wheel.sha256}" }}',
    ]
