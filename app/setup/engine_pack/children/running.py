"""Runs a program with a time limit."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine import NO_WINDOW, Cancelled, tie_child

POLL_S = 0.1
MAX_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """A program's result; `status` is None if the program was killed at the time limit."""

    status: int | None
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        """Last non-empty line of stderr, or of stdout if stderr is empty."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines()]
        return next((line for line in reversed(lines) if line), "")


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    is_stopped: Callable[[], bool] = lambda: False,
    each_poll: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a program and wait for it.

    Args:
        limit_s: time limit in seconds.
        each_poll: called about ten times per second while the program runs.

    Raises:
        Cancelled: `is_stopped` returned True; the program was killed.
        OSError: the program cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors, creationflags=NO_WINDOW,
        )  # fmt: skip
        tie_child(process.pid)
        status: int | None = None
        try:
            until = time.monotonic() + limit_s
            while time.monotonic() < until:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(POLL_S)
                    break
                if is_stopped():
                    raise Cancelled("The installation")
                each_poll()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        texts = []
        for file in (output, errors):
            size = file.tell()
            file.seek(max(0, size - MAX_READ))
            texts.append(file.read().decode(errors="replace"))
        return Ended(status, *texts)
