"""What to say where the system lacks a library that Qt links against."""

from __future__ import annotations

import re
import shutil

from engine import EngineError

DEBIAN_PACKAGES = "libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 libglib2.0-0"
"""Debian's names of all system libraries that Qt needs without a display."""

MISSING = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")


class MissingQtLibrary(EngineError):
    """A system library of Qt is missing, so there can be no window."""


def missing_qt_library(error: ImportError) -> MissingQtLibrary | None:
    """Return the sentence about the library that `error` names; None if it names none."""
    found = MISSING.search(str(error))
    if found is None:
        return None
    has_apt = shutil.which("apt-get") is not None
    return MissingQtLibrary(
        f"The window needs Qt, and Qt needs the system library {found[1]}, which is missing.",
        f"Install it with: apt-get install {DEBIAN_PACKAGES}" if has_apt else "",
    )
