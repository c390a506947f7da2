"""A desktop without a screen: an X server, a window manager and a session bus in a root."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from proving.root import Root

PACKAGES = ("xvfb", "openbox", "xdotool", "maim", "x11-utils", "dbus-x11", "libglib2.0-bin")
DISPLAY = ":99"
RUNTIME = "/run/anna"
SIZE = "1440x900x24"


class Desktop:
    """The desktop of a person; screenshots go into a folder."""

    def __init__(self, root: Root, shots: Path) -> None:
        self.root = root
        self.shots = shots
        self._n_shots = 0

    def start(self) -> None:
        """Start the X server, the bus and the window manager."""
        runtime = self.root.folder / RUNTIME.lstrip("/")
        self.root.run("install", "-d", "-o", "anna", "-m", "700", RUNTIME)
        self.root.run("install", "-d", "-m", "1777", "/tmp/.X11-unix")
        bus = f"unix:path={RUNTIME}/bus"
        self.root.environment = {
            "DISPLAY": DISPLAY, "XDG_RUNTIME_DIR": RUNTIME, "DBUS_SESSION_BUS_ADDRESS": bus,
            "XDG_SESSION_TYPE": "x11", "XDG_CURRENT_DESKTOP": "GNOME",
        }  # fmt: skip
        log = self.shots / "desktop.log"
        command = ("Xvfb", DISPLAY, "-screen", "0", SIZE, "-nolisten", "tcp")
        self.root.start_as_person(log, *command)
        self.root.start_as_person(log, "dbus-daemon", "--session", f"--address={bus}", "--nofork")
        wait_for(lambda: (runtime / "bus").exists(), 20, "the session bus")
        wait_for(self._has_display, 30, "the X server")
        self.root.start_as_person(log, "openbox")
        wait_for(self._has_window_manager, 30, "the window manager")

    def windows(self, name: str = "Tandem") -> list[str]:
        """Return the windows that are shown with a title."""
        return self._answers("xdotool", "search", "--onlyvisible", "--name", name).split()

    def wait_for_window(self, seconds: float = 90) -> str:
        """Return Tandem's window once it is shown."""
        wait_for(lambda: self.windows(), seconds, "Tandem's window")
        window = self.windows()[0]
        self.root.run_as_person("xdotool", "windowactivate", window)
        return window

    def title(self, window: str) -> str:
        return self.root.run_as_person("xdotool", "getwindowname", window).strip()

    def press(self, *keys: str) -> None:
        self.root.run_as_person("xdotool", "key", *keys)

    def type(self, text: str) -> None:
        self.root.run_as_person("xdotool", "type", "--delay", "25", text)

    def close(self, window: str) -> None:
        """Close a window as its button does, and wait until it is gone."""
        self.root.run_as_person("xdotool", "windowactivate", "--sync", window, "key", "alt+F4")
        wait_for(lambda: window not in self.windows(), 60, "the end of the window")

    def click(self, window: str, x: int, y: int) -> None:
        """Click at a place of a window."""
        place = ("mousemove", "--window", window, str(x), str(y), "click", "1")
        self.root.run_as_person("xdotool", *place)

    def shoot(self, name: str) -> None:
        """Write a picture of the whole screen."""
        self._n_shots += 1
        self.root.run_as_person("maim", f"{RUNTIME}/shot.png")
        shot = self.root.folder / RUNTIME.lstrip("/") / "shot.png"
        (self.shots / f"{self._n_shots:02}-{name}.png").write_bytes(shot.read_bytes())

    def _has_display(self) -> bool:
        return bool(self._answers("xdpyinfo"))

    def _has_window_manager(self) -> bool:
        return "window id" in self._answers("xprop", "-root", "_NET_SUPPORTING_WM_CHECK")

    def _answers(self, *command: str) -> str:
        try:
            return self.root.run_as_person(*command, timeout=20)
        except (AssertionError, subprocess.TimeoutExpired):
            return ""


def wait_for(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not within that time.
    """
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.5)
