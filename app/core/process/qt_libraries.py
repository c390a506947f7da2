"""The error message for a system that lacks a library of Qt."""

from __future__ import annotations

import re
import shutil

from engine import EngineError

DEBIAN_PACKAGES = "libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 libglib2.0-0"
"""Debian packages of all system libraries that Qt needs without a display."""

XCB_PACKAGES = (
    "libxcb-cursor0 libxcb-icccm4 libxcb-image0 libxcb-keysyms1 libxcb-render-util0 libxcb-shape0"
    " libxcb-xinerama0 libxcb-xkb1 libxkbcommon-x11-0"
)
"""Debian packages of what Qt needs beside these to draw on X11."""

XCB_PREFIXES = ("libxcb", "libxkbcommon-x11")

MISSING = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")


class MissingQtLibrary(EngineError):
    """A missing system library of Qt, without which there is no window."""


def missing_qt_library(error: ImportError) -> MissingQtLibrary | None:
    """Return the error to report for an import that failed; None if no library is missing."""
    found = MISSING.search(str(error))
    if found is None:
        return None
    packages = XCB_PACKAGES if found[1].startswith(XCB_PREFIXES) else DEBIAN_PACKAGES
    has_apt = shutil.which("apt-get") is not None
    return MissingQtLibrary(
        f"The window needs Qt, and Qt needs the system library {found[1]}, which is missing.",
        f"Install it with: apt-get install {packages}" if has_apt else "",
    )
