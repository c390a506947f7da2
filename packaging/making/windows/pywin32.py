"""pywin32, with which processes of tool servers are ended: few of its parts, found without pip."""

from __future__ import annotations

from pathlib import Path

from making.files import delete_matching

FOLDERS = ("win32", "win32/lib")
"""Folders below the libraries that pywin32's own .pth file would make known."""

UNUSED = (
    "PyWin32.chm", "adodbapi", "isapi", "pythoncom.py", "pythonwin", "win32com", "win32comext",
    "pywin32_system32/pythoncom*.dll", "win32/Demos", "win32/scripts", "win32/test",
)  # fmt: skip
"""Parts that nothing imports; without COM, send2trash takes the shell's older function."""


def prune_pywin32(site: Path) -> None:
    """Delete the parts of pywin32 that Tandem does not use."""
    delete_matching(site, UNUSED)
