"""`tandem serve --nodes` and `tandem join` as processes of a test, which all end with it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import psutil

from tests.helpers.network import Place

TOKEN = "a token of a test"
START_S = 120.0

LONG = 3900
"""Number of tokens of an answer that lasts until a machine fails, of a model with 4096."""

HERE = Place("127.0.0.1")
"""Place where tests run themselves."""


class NodeProcess:
    """One `tandem` process.

    Args:
        log: file with all that it has written.
        arguments: its command line behind the program's name.
        place: where it runs.
    """

    def __init__(self, log: Path, *arguments: str, place: Place = HERE) -> None:
        self.log = log
        self._file = log.open("wb")
        environment = {**os.environ, "TANDEM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*place.prefix, sys.executable, "-m", "app", *arguments], env=environment,
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT,
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
        return next(x for x in children if "engine.hosts.machines.worker" in x.cmdline())

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

    Args:
        folder: folder of the logs.
        model: the model's file.
        places: where they run.
        options: further options of the server.

    Attributes:
        server: the server's process.
        joined: the others.
        address: address of its HTTP side, once it is ready.
    """

    def __init__(self, folder: Path, model: Path, places: Sequence[Place], *options: str) -> None:
        self.folder, self.places = folder, places
        self.server = NodeProcess(
            folder / "serve.log", "serve", str(model), "--nodes", str(len(places)), "--rendezvous",
            f"{places[0].address}:0", "--devices", "cpu", "--threads", "1", "--port", "0", *options,
            place=places[0],
        )  # fmt: skip
        self.rendezvous = self.server.wait_for(r"join \S+").removeprefix("join ")
        self.joined: list[NodeProcess] = []

    def join(self, *options: str) -> NodeProcess:
        """Start the next machine, which joins from its own address."""
        found = self._joining(len(self.joined) + 1, *options)
        self.joined.append(found)
        found.wait_for("Joined as machine")  # so that numbers and places are alike
        return found

    def join_again(self, number: int) -> None:
        """Start a machine that has ended."""
        self.joined[number - 1].end()
        self.joined[number - 1] = self._joining(number)

    def _joining(self, number: int, *options: str) -> NodeProcess:
        """Start a machine."""
        place = self.places[number]
        return NodeProcess(
            self.folder / f"join{number}.log", "join", self.rendezvous, "--devices", "cpu",
            "--threads", "1", "--interface", place.address, *options, place=place,
        )  # fmt: skip

    @property
    def all(self) -> list[NodeProcess]:
        """All processes, by the machines' numbers."""
        return [self.server, *self.joined]

    def wait(self) -> None:
        """Wait until the server answers."""
        line = self.server.wait_for(r"listening on \S+")
        self.address = line.removeprefix("listening on ")

    def end(self) -> list[psutil.Process]:
        """End all; return what is left of their children."""
        return [x for process in self.all for x in process.end()]


@contextmanager
def nodes(
    folder: Path, model: Path, places: int | Sequence[Place], *options: str
) -> Iterator[Nodes]:
    """Have a model computed by machines, which end with the context; this thread is at the first.

    Args:
        places: where they run; or how many run here.
    """
    where = [HERE] * places if isinstance(places, int) else places
    found = Nodes(folder, model, where, *options)
    try:
        for _ in where[1:]:
            found.join()
        found.wait()
        with where[0].entered():
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


def read_until_lost(client: openai.OpenAI, problem: list[str]) -> None:
    """Read an answer that lasts until a machine fails, and add what is told then to `problem`."""
    try:
        stream = client.completions.create(
            model="m", prompt="on and on", max_tokens=LONG, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _ in stream:
            pass
        problem.append("it has ended by itself")
    except openai.APIError as error:
        problem.append(str(error))


def wait_until_all_end_well(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until processes have ended without an error; none runs on in any case."""
    try:
        assert [process.wait(120) for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
