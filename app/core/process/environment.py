"""What the program's environment allows and asks for: a display, and where the engine runs.

Without a display, Qt ends the process in C++ with a core dump.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import engine
from engine import EngineError

if TYPE_CHECKING:
    from engine import EngineHost, HostEvent

HINT = "Start it on a desktop, or use `tandem chat MODEL.gguf` in the terminal."


class NoDisplay(EngineError):
    """There is no display that a window could open on."""


def check_display(environment: Mapping[str, str] = os.environ) -> None:
    """Check that a window can open; where Qt is told or left another way than X11, believe it.

    Raises:
        NoDisplay: there is no display, or none that answers.
        ImportError: a library is missing that Qt needs to draw on X11.
    """
    if sys.platform != "linux" or environment.get("QT_QPA_PLATFORM", "xcb") != "xcb":
        return
    if environment.get("WAYLAND_DISPLAY"):
        return
    name = environment.get("DISPLAY", "")
    if not name:
        raise NoDisplay("There is no display for the window.", HINT)
    _check_plugin()
    if not _answers(name):
        raise NoDisplay(f"The display {name} does not answer.", HINT)


def _check_plugin() -> None:
    """Load Qt's plugin for X11, as Qt will.

    Raises:
        ImportError: one of its libraries is missing.
    """
    package = find_spec("PySide6")
    for folder in (package.submodule_search_locations if package else None) or ():
        plugin = Path(folder) / "Qt" / "plugins" / "platforms" / "libqxcb.so"
        if plugin.exists():
            try:
                ctypes.CDLL(str(plugin))
            except OSError as error:
                raise ImportError(str(error)) from None


def _answers(name: str) -> bool:
    """Return whether an X11 server takes connections; True where nobody can tell."""
    try:
        xcb = ctypes.CDLL("libxcb.so.1")
    except OSError:
        return True
    xcb.xcb_connect.restype = ctypes.c_void_p
    xcb.xcb_connect.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    xcb.xcb_connection_has_error.argtypes = xcb.xcb_disconnect.argtypes = [ctypes.c_void_p]
    connection = xcb.xcb_connect(os.fsencode(name), None)
    is_broken = xcb.xcb_connection_has_error(connection) != 0
    xcb.xcb_disconnect(connection)
    return not is_broken


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


log = logging.getLogger(__name__)


VARIABLE = "TANDEM_ENGINE"
"""Environment variable with the choice: "process", as without it, or "thread"."""

MakeHost = Callable[[Callable[["HostEvent"], None]], "EngineHost"]

PLACES = ("process", "thread")


def engine_place() -> str:
    """Return one of `PLACES`, as the environment variable says.

    Raises:
        EngineError: the variable has another value.
    """
    choice = os.environ.get(VARIABLE, "") or "process"
    if choice not in PLACES:
        raise EngineError(f"{VARIABLE} is '{choice[:60]}'.", f"Set it to {' or '.join(PLACES)}.")
    return choice


def chosen_host() -> MakeHost:
    """Return what starts the engine there; imports it, which takes a moment.

    Raises:
        EngineError: see `engine_place`.
    """
    return engine.ProcessHost if engine_place() == "process" else engine.ThreadHost


def start_host(on_event: Callable[[HostEvent], None]) -> EngineHost:
    """Start the chosen engine, which sends its events to `on_event`.

    Raises:
        EngineError: see `engine_place`.
    """
    return chosen_host()(on_event)
