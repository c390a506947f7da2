"""Programs and libraries for Windows: which they are, and what they load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from making.project import output

SUFFIXES = (".exe", ".dll", ".pyd")
SYSTEM_LIBRARIES = Path("/usr/x86_64-w64-mingw32/lib")
"""Folder where mingw-w64 has a file for each library of Windows."""

NEWER_IN_WINDOWS = ("icuuc.dll", "bcryptprimitives.dll", "combase.dll", "uiautomationcore.dll")
"""Libraries of Windows 10 1809 and later that mingw-w64 has no file for."""

NAME = re.compile(r"^\s*DLL Name: (\S+)$", re.MULTILINE)


def binaries(folder: Path) -> list[Path]:
    """Return the programs and libraries below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def loaded_libraries(path: Path) -> list[str]:
    """Return the names of the libraries that a program or library loads, in lower case."""
    return [
        name.lower() for name in NAME.findall(output("x86_64-w64-mingw32-objdump", "-p", str(path)))
    ]


def missing_libraries(folder: Path) -> list[str]:
    """Return what is loaded by files below a folder and is neither there nor a part of Windows."""
    files = binaries(folder)
    present = {path.name.lower() for path in files}
    return sorted(
        f"{path.relative_to(folder)} loads {name}"
        for path in files
        for name in loaded_libraries(path)
        if name not in present and not is_of_windows(name)
    )


def is_of_windows(name: str) -> bool:
    """Return whether Windows 10 1809 and later have a library themselves.

    The runtime of Visual C++ is not theirs, though many programs bring it.
    """
    if re.match(r"(vcruntime|msvcp|concrt|vcomp|vccorlib)\d", name):
        return False
    if name.startswith(("api-ms-win-", "ext-ms-win-")) or name in NEWER_IN_WINDOWS:
        return True
    return any((SYSTEM_LIBRARIES / f"lib{stem}.a").exists() for stem in _stems(name))


def _stems(name: str) -> Iterable[str]:
    return (name, name.removesuffix(".dll"))
