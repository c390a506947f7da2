"""The frame of a proof: a root is made, steps are run one after another, all is cleaned up."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from proving.desktop import Desktop
from proving.root import Root


def run_steps(
    steps: Sequence[Callable[[], None]], root: Root, desktop: Desktop, suite: str, base: Path | None
) -> None:
    """Make the root and run the steps; end what runs there, whatever happens.

    Raises:
        SystemExit: a step has failed; a picture shows how the desktop looked.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    shutil.rmtree(desktop.shots, ignore_errors=True)
    desktop.shots.mkdir(parents=True)
    root.folder.chmod(0o755)
    step = steps[0]
    try:
        root.make(suite, base)
        for step in steps:
            step()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        with suppress(AssertionError, OSError):
            desktop.shoot("failed")
        sys.stderr.write(f"FAILED  {step.__doc__}\n{error}\n")
        raise SystemExit(1) from None
    finally:
        root.leave()


def say(line: str) -> None:
    """Print the line of a step that held."""
    sys.stdout.write(f"ok  {line}\n")
    sys.stdout.flush()
