"""`tandem serve` in a process of its own, for long campaigns."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import httpx2
import psutil

from tests.helpers.process_watch import ProcessWatch

STOP_S = 120.0
QUIET_S = 5.0


class ServeProcess:
    """The server, in a `with` block.

    Attributes:
        address: where it listens.
        process: the server's own process.
        watch: measurements of its processes.
    """

    def __init__(self, *options: str, model: str = "demo") -> None:
        command = [sys.executable, "-m", "app", "serve", model, "--port", "0", "--only"]
        self.watch = ProcessWatch()
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=self.watch.environment,
        )  # fmt: skip
        self.process = psutil.Process(self._process.pid)
        self.address = ""

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        found = re.search(r"http://\S+", self._process.stdout.readline())
        assert found is not None, "the server says where it listens"
        self.address = found[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._process.terminate()
        self._process.wait(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.watch.close()

    def kill(self) -> None:
        """End the server and its engine as a loss of the machine would."""
        for process in [self.process, *self.process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(STOP_S)

    def measure(self, at: int) -> None:
        """Measure the server and its engine after `at` requests, when both are idle."""
        deadline = time.monotonic() + QUIET_S
        while not is_quiet(self.address) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.watch.measure(self._process.pid, at)


def is_quiet(address: str) -> bool:
    """Return whether a server answers nobody."""
    return "tandem_answers_running 0\n" in httpx2.get(f"{address}/metrics", trust_env=False).text
