"""Compiled files of a tree: which they are, what they load, and which C library they need."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from making.project import output

NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
GLIBC = re.compile(r"\bGLIBC_(\d+)\.(\d+)")


def elf_files(folder: Path) -> list[Path]:
    """Return the programs and shared libraries below a folder."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and _starts_as_elf(path)
    ]


def needed_libraries(path: Path) -> list[str]:
    """Return the names of the libraries that a compiled file loads."""
    return NEEDED.findall(output("readelf", "-d", str(path)))


def least_glibc(files: Iterable[Path]) -> str:
    """Return the oldest version of the C library, such as "2.35", that has all that files use."""
    versions = [
        (int(major), int(minor))
        for path in files
        for major, minor in GLIBC.findall(output("readelf", "-W", "--version-info", str(path)))
    ]
    return "{}.{}".format(*max(versions))


def _starts_as_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
