"""The child process that renders templates, as the process that started it sees it."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from typing import Any

from engine.programs import NO_WINDOW, child_environment, program_command, tie_child
from engine.templates.limits import GRACE_S, MAX_MEMORY, OUT_OF_MEMORY, PIPE_BUFFER
from engine.templates.watch import AnswerWatch, Excess

COMMAND = program_command("engine.templates.program")
"""Command of the child."""

START_S = 20.0
"""Seconds for the child to import jinja2, on a machine that is busy with loading a model."""

NEEDS_MEMORY = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"


class TemplateChildEnded(Exception):
    """End of the child without an answer; the text says why, where "it" is the template."""


class TemplateChild:
    """A process that renders one prompt after another, for one thread at a time.

    Its error output goes nowhere. It ends with its standard input, so when this process ends.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=child_environment(), creationflags=NO_WINDOW, bufsize=PIPE_BUFFER,
        )  # fmt: skip
        tie_child(self.pid)
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the child has imported what it needs.

        Raises:
            OSError: it ends or is silent instead.
        """
        if self._is_ready:
            return
        line, excess = self._exchange(b"", START_S)
        if excess:
            raise OSError(f"it takes more than {START_S:g} seconds or {MAX_MEMORY >> 20} MiB")
        if not line:
            raise OSError(f"it ended with status {self._status()}")
        self._is_ready = True

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Return the answer to a request, a line of JSON.

        Args:
            seconds: time for compiling and rendering.

        Raises:
            TemplateChildEnded: there is no answer, and the child is gone or going.
        """
        line, excess = self._exchange(request, seconds + GRACE_S)
        if excess is Excess.TIME:
            raise TemplateChildEnded(f"it runs for more than {seconds:g} seconds")
        if excess is Excess.MEMORY:
            raise TemplateChildEnded(NEEDS_MEMORY)
        if not line.endswith(b"\n"):
            status = self._status()
            crash = f"it ends the program that renders it, with status {status}"
            raise TemplateChildEnded(NEEDS_MEMORY if status == OUT_OF_MEMORY else crash)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def kill(self) -> None:
        """End the process, whatever it does; any thread may call it."""
        self._process.kill()

    def close(self) -> None:
        """End the process, whatever it does, and close its pipes."""
        self.kill()
        self._status()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _exchange(self, request: bytes, seconds: float) -> tuple[bytes, Excess | None]:
        """Write a request; return the line that answers it, and why the process was killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        with AnswerWatch(self._process, seconds, MAX_MEMORY) as watch, suppress(OSError):
            stdin.write(request)
            stdin.flush()
            line = stdout.readline()
        return line, watch.excess

    def _status(self) -> int | None:
        """Return the exit status of a process that is ending; None if it takes long to end."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5)
        return None
