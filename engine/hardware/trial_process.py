"""A child process for trials that may hang or crash; it is killed if it falls silent.

Drivers may hang, and a kernel that accesses a bad address costs the process its GPU. The child
reads a request as one line of JSON, and writes one line before each trial and one with its result.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine.util.programs import NO_WINDOW, child_environment, tie_child

MAX_SAID = 2000
"""Maximum number of bytes from a failed child's error output that are logged."""

HUNG = "hung"
"""Last message for a child that fell silent."""


class TrialProcess:
    """A child process that runs trials one by one; it is killed when the context exits.

    Args:
        request: the child's task, as JSON.

    Raises:
        OSError: the child cannot be started.
    """

    def __init__(
        self, command: Sequence[str], request: object, variables: Mapping[str, str]
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 closed when the context exits
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=child_environment(variables), text=True, encoding="utf-8",
                creationflags=NO_WINDOW,
            )  # fmt: skip
        except BaseException:
            self._errors.close()
            raise
        tie_child(self._process.pid)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="tandem-trials", daemon=True)
        self._reader.start()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.close()

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the child."""
        if self._process.poll() is None:
            self._process.kill()
        # a process inside a hung driver does not exit before the driver returns
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._reader.join(1)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def messages(self, start_s: float, step_s: float) -> Iterator[dict[str, Any] | str]:
        """Yield the child's messages as JSON objects.

        If the child fails, the last item is `HUNG` or a text such as "exit status 3".

        Args:
            start_s: seconds of silence allowed before the first message.
            step_s: seconds of silence allowed after that.
        """
        patience = start_s
        while True:
            try:
                line = self._lines.get(timeout=patience)
            except queue.Empty:
                yield HUNG
                return
            if line is None:
                if code := self._process.wait():
                    yield f"exit status {code}"
                return
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message
                    patience = step_s

    def said(self) -> str:
        """Return the end of the child's error output."""
        self._errors.seek(0)
        return self._errors.read()[-MAX_SAID:].decode(errors="replace").strip()

    def _read(self) -> None:
        # on the reader thread
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)
