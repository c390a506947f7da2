"""A window that cannot open says so in one line, where Qt would abort."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from app.core.process import environment as display
from app.core.process.environment import (
    DEBIAN_PACKAGES,
    XCB_PACKAGES,
    NoDisplay,
    check_display,
    missing_qt_library,
)
from tests.helpers.golden import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such displays")


def test_a_program_without_a_display_ends_with_one_line() -> None:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    found = subprocess.run(
        [sys.executable, "-m", "app", "--demo"], env=environment, cwd=REPO, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == (
        "There is no display to open a window on. Start Tandem on a desktop, or run `tandem chat"
        " MODEL.gguf` in the terminal.\n"
    )


@pytest.mark.parametrize(
    "environment",
    [{"QT_QPA_PLATFORM": "offscreen"}, {"WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":59077"}],
)
def test_other_ways_to_show_a_window_are_left_to_qt(environment: dict[str, str]) -> None:
    check_display(environment)


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_check_plugin", lambda: None)
    with pytest.raises(NoDisplay, match=r"^Display :59077 does not respond\.$"):
        check_display({"DISPLAY": ":59077"})


def test_a_missing_library_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> SimpleNamespace:
        raise OSError("libxcb-icccm.so.4: cannot open shared object file: No such file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/apt-get")
    with pytest.raises(ImportError) as raised:
        check_display({"DISPLAY": ":0"})
    missing = missing_qt_library(raised.value)
    assert missing is not None
    assert "libxcb-icccm.so.4" in missing.message
    assert missing.hint == f"Install it with: apt-get install {XCB_PACKAGES}"
    egl = missing_qt_library(ImportError("libEGL.so.1: cannot open shared object file"))
    assert egl is not None
    assert egl.hint.endswith(DEBIAN_PACKAGES)
