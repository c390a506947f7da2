"""Mach-O files of macOS: one processor's part of them, and what they load."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

ARM64 = 0x0100000C
FAT = 0xCAFEBABE
THIN = 0xFEEDFACF
LOADS = (0xC, 0x80000018, 0x8000001F)
"""Commands that load a library: always, if it is there, and to show its names as own ones."""

OF_SYSTEM = ("/usr/lib/", "/System/Library/")


def mach_files(folder: Path) -> list[Path]:
    """Return the programs and libraries below a folder."""
    return [
        path for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and _magic(path) in (FAT, THIN)
    ]  # fmt: skip


def thin(path: Path) -> None:
    """Leave only the part for Apple's own processors of a file that is for several.

    Raises:
        SystemExit: it has none.
    """
    data = path.read_bytes()
    part = _arm64_part(path)
    if part != data:
        path.write_bytes(part)


def loaded_libraries(path: Path) -> list[str]:
    """Return the names of the libraries that a program or library loads, as they stand in it."""
    names = []
    for command, body in _commands(_arm64_part(path)):
        if command in LOADS:
            (start,) = struct.unpack_from("<I", body, 8)
            names.append(body[start:].split(b"\0", 1)[0].decode())
    return names


def missing_libraries(folder: Path, files: list[Path]) -> list[str]:
    """Return what files load that is neither among them nor a part of macOS."""
    present = {path.name for path in files}
    return [
        f"{path.relative_to(folder)} loads {name}"
        for path in files
        for name in loaded_libraries(path)
        if not name.startswith(OF_SYSTEM) and Path(name).name not in present
    ]


def _magic(path: Path) -> int:
    with path.open("rb") as file:
        start = file.read(4)
    if len(start) < 4:
        return 0
    (big,), (little,) = struct.unpack(">I", start), struct.unpack("<I", start)
    return big if big == FAT else little


def _arm64_part(path: Path) -> bytes:
    """Return the bytes of a file that are for Apple's own processors.

    Raises:
        SystemExit: there are none.
    """
    data = path.read_bytes()
    magic, count = struct.unpack_from(">II", data)
    for number in range(count if magic == FAT else 0):
        kind, _, start, size, _ = struct.unpack_from(">IIIII", data, 8 + 20 * number)
        if kind == ARM64:
            data = data[start : start + size]
            break
    if struct.unpack_from("<II", data) != (THIN, ARM64):
        raise SystemExit(f"{path} is not for Apple's own processors.")
    return data


def _commands(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each load command."""
    (count,) = struct.unpack_from("<I", data, 16)
    place = 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, place)
        yield command, data[place : place + size]
        place += size
