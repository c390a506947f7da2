"""What killed windows and engines leave is swept at the next start, and at the next load."""

import subprocess
import sys
from pathlib import Path

from pytestqt.qtbot import QtBot

from app.core.paths import chat_caches_dir, settings_file
from tests.helpers.shell_driver import MODEL, MakeShell

LEAVE = """
import os, sys
from pathlib import Path
from engine.util.files import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"x" * 100)
    file.flush()
    os._exit(0)
"""


def leave_temporary(folder: Path) -> Path:
    """Have a process leave a temporary in a folder; return the temporary."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    subprocess.run([sys.executable, "-c", LEAVE, str(folder / "x")], check=True, timeout=60)
    (left,) = set(folder.iterdir()) - before
    return left


def test_a_start_sweeps(qtbot: QtBot, make_shell: MakeShell) -> None:
    left = [leave_temporary(f) for f in (chat_caches_dir(), settings_file().parent)]
    make_shell()
    qtbot.waitUntil(lambda: not any(path.exists() for path in left))


def test_a_load_sweeps_what_an_engine_has_left_since(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    left = leave_temporary(chat_caches_dir())
    other = left.with_name("kept.safetensors")
    other.write_bytes(b"x")
    shell.models.load()
    qtbot.waitUntil(lambda: not left.exists())
    assert other.exists()
