"""`tandem serve --nodes` and `tandem join` as processes of a test, which all end with it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

TOKEN = "a token of a test"
START_S = 120.0


class NodeProcess:
    """One `tandem` process.

    Attributes:
        log: file with all that it has written.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self._file = log.open("wb")
        environment = {**os.environ, "TANDEM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", *arguments], env=environment, stdin=subprocess.DEVNULL,
            stdout=self._file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = START_S, start: int = 0) -> str:
        """Wait until it has written a pattern behind its first characters; return the match."""
        end = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text[start:])) is None:
            assert time.monotonic() < end, f"no '{pattern}' in: {self.text}"
            assert self.process.poll() is None, f"it has ended: {self.text}"
            time.sleep(0.05)
        return found[0]

    def worker(self) -> psutil.Process:
        """Return the process with its ranks."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(x for x in children if "engine.machines.worker" in x.cmdline())

    def end(self) -> list[psutil.Process]:
        """End it, and return what is left of its children."""
        self._file.close()
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(children, 10)
        for process in alive:
            process.kill()
        return list(alive)


class Nodes:
    """A server and the machines that have joined it.

    Attributes:
        server: the server's process.
        joined: the others.
        address: address of its HTTP side, once it is ready.
    """

    def __init__(self, folder: Path, model: Path, n: int, *options: str) -> None:
        self.folder = folder
        self.server = NodeProcess(
            folder / "serve.log", "serve", str(model), "--nodes", str(n), "--rendezvous",
            "127.0.0.1:0", "--devices", "cpu", "--threads", "1", "--port", "0", *options,
        )  # fmt: skip
        self.rendezvous = self.server.wait_for(r"join \S+").removeprefix("join ")
        self.joined: list[NodeProcess] = []

    def join(self, *options: str) -> NodeProcess:
        """Start a machine that joins."""
        log = self.folder / f"join{len(self.joined)}.log"
        found = NodeProcess(
            log, "join", self.rendezvous, "--devices", "cpu", "--threads", "1", *options
        )
        self.joined.append(found)
        return found

    def wait(self) -> None:
        """Wait until the server answers."""
        line = self.server.wait_for(r"listening on \S+")
        self.address = line.removeprefix("listening on ")

    def end(self) -> list[psutil.Process]:
        """End all; return what is left of their children."""
        return [x for process in [self.server, *self.joined] for x in process.end()]


@contextmanager
def nodes(folder: Path, model: Path, n: int, *options: str) -> Iterator[Nodes]:
    """Have a model computed by n machines, which end with the context."""
    found = Nodes(folder, model, n, *options)
    try:
        for _ in range(1, n):
            found.join()
        found.wait()
        yield found
    finally:
        left = found.end()
    assert not left, f"orphans: {left}"


def until(is_true: Callable[[], bool], timeout_s: float) -> float:
    """Wait until something is true; return the seconds it took."""
    begun = time.monotonic()
    while not is_true():
        assert time.monotonic() < begun + timeout_s, "it does not happen"
        time.sleep(0.05)
    return time.monotonic() - begun
