"""The environment: whether there is a display, and whether the engine has its own process.

If there is no display, Qt aborts the process with a core dump.
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

HINT = "Start Tandem on a desktop, or run `tandem chat MODEL.gguf` in the terminal."


class NoDisplay(EngineError):
    """There is no display for a window."""


def check_display(environment: Mapping[str, str] = os.environ) -> None:
    """Check that X11 can open a window; trust other platforms and explicit Qt settings.

    Raises:
        NoDisplay: there is no display, or it does not respond.
        ImportError: Qt's X11 plugin lacks a library.
    """
    if sys.platform != "linux" or environment.get("QT_QPA_PLATFORM", "xcb") != "xcb":
        return
    if environment.get("WAYLAND_DISPLAY"):
        return
    name = environment.get("DISPLAY", "")
    if not name:
        raise NoDisplay("There is no display to open a window on.", HINT)
    _check_plugin()
    if not _answers(name):
        raise NoDisplay("Display {name} does not respond.", HINT, name=name)


def _check_plugin() -> None:
    """Check that Qt's X11 plugin can be loaded.

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
    """Return whether an X11 server accepts connections; True if libxcb is missing."""
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
"""Debian packages with the system libraries that Qt needs, except those for X11."""

XCB_PACKAGES = (
    "libxcb-cursor0 libxcb-icccm4 libxcb-image0 libxcb-keysyms1 libxcb-render-util0 libxcb-shape0"
    " libxcb-xinerama0 libxcb-xkb1 libxkbcommon-x11-0"
)
"""Additional Debian packages that Qt needs on X11."""

XCB_PREFIXES = ("libxcb", "libxkbcommon-x11")

MISSING = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")


class MissingQtLibrary(EngineError):
    """Qt lacks a system library."""


def missing_qt_library(error: ImportError) -> MissingQtLibrary | None:
    """Return the error for a failed import, or None if no shared library is missing."""
    match = MISSING.search(str(error))
    if match is None:
        return None
    packages = XCB_PACKAGES if match[1].startswith(XCB_PREFIXES) else DEBIAN_PACKAGES
    has_apt = shutil.which("apt-get") is not None
    return MissingQtLibrary(
        "Qt needs the system library {library}, which is missing.",
        "Install it with: apt-get install {packages}" if has_apt else "",
        library=match[1],
        packages=packages,
    )


log = logging.getLogger(__name__)


VARIABLE = "TANDEM_ENGINE"  # environment variable that selects "process" (default) or "thread"
MakeHost = Callable[[Callable[["HostEvent"], None]], "EngineHost"]

PLACES = ("process", "thread")


def engine_place() -> str:
    """Return where the engine runs, one of `PLACES`.

    Raises:
        EngineError: the environment variable is invalid.
    """
    choice = os.environ.get(VARIABLE, "") or "process"
    if choice not in PLACES:
        raise EngineError(
            "{name} is '{value}'.", "Set it to process or thread.", name=VARIABLE, value=choice[:60]
        )
    return choice


def chosen_host() -> MakeHost:
    """Return the class that starts the engine; importing it takes a moment."""
    return engine.ProcessHost if engine_place() == "process" else engine.ThreadHost


def start_host(on_event: Callable[[HostEvent], None]) -> EngineHost:
    """Start the engine, which sends its events to `on_event`."""
    return chosen_host()(on_event)
