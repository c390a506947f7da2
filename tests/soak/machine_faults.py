"""Machines of one model fail in the middle of an answer, and are named on all others in time.

    python -m tests.soak.machine_faults --rounds 50

Three machines on a bridge compute an endless answer. In each round the process of one of them is
killed or stopped, all its processes are, or its cable is pulled. The client and each machine that
runs on get a sentence that names it; nothing is left of the processes that computed, the machine
joins again, and the model gives the known answer.

Where network namespaces are not permitted, machines are addresses of the loopback interface, which
have no cables.
"""

import random
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import httpx2
import openai
import psutil

from tests.helpers.network import Network, Place, loopback, network
from tests.helpers.node_processes import NodeProcess, nodes, read_until_lost, until
from tests.helpers.tiny_gguf import tiny_gguf
from tests.soak.campaign import Report, run_campaign
from tests.soak.phases import Phase

N = 3

NAMED_S = 5.0
"""Seconds within which a machine that has failed is named."""

BACK_S = 60.0
"""Seconds within which all machines are back, on a busy machine."""

KINDS = ("killed", "stopped", "cut", "gone", "asleep")
"""What becomes of a machine: its process is killed or stopped, its cable is pulled, `tandem join`
is killed, or all its processes are stopped for some seconds."""


class FaultReport(Report):
    """Seconds until the machine that has failed was named everywhere, and until it was back."""

    def __init__(self) -> None:
        super().__init__()
        self._all: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: Mapping[str, float], phase: Phase | None = None) -> None:
        for name, value in seconds.items():
            self._all[f"{kind}: {name}"].append(value)

    def __str__(self) -> str:
        return "; ".join(
            f"{name} {min(found):.2f} to {max(found):.2f} s, median {statistics.median(found):.2f}"
            f" ({len(found)})"
            for name, found in sorted(self._all.items())
        )


class MachineFaults:
    """Three machines that fail again and again."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        self._chance, self._stack = random.Random(seed), ExitStack()
        self._network: Network | None = None
        try:
            self._network = self._stack.enter_context(network(N))
            places: Sequence[Place] = self._network.places
        except OSError as error:
            sys.stdout.write(f"on the loopback interface, as {error}\n")
            places = loopback(N)
        path = tiny_gguf(
            home / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_ctx=4096
        )
        self._there = self._stack.enter_context(nodes(home, path, places))
        self._client = openai.OpenAI(
            base_url=f"{self._there.address}/v1", api_key="-", max_retries=0
        )
        self._stack.callback(self._client.close)
        kinds = [only] if only else [k for k in KINDS if self._network or k != "cut"]
        # machine 0 is the server: it stays, so only what computes there fails, or its cable
        self._cases = [
            (kind, number)
            for number in range(N)
            for kind in kinds
            if number or kind not in ("gone", "asleep")
        ]
        self._expected = self._answer()
        self.report: Report = FaultReport()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def close(self) -> None:
        """End all machines; nothing may be left of them."""
        self._stack.close()

    def round(self, number: int) -> None:
        """Have a machine fail, and see that it is named and comes back."""
        kind, victim = self._cases[number % len(self._cases)]
        there, problem = self._there, list[str]()
        begins = [len(process.text) for process in there.all]
        reader = threading.Thread(target=read_until_lost, args=(self._client, problem))
        reader.start()
        until(lambda: self._n_running() > 0, BACK_S)
        time.sleep(self._chance.random())
        computing = [process.worker() for process in there.all]
        frozen = self._break(kind, victim)
        seconds = self._named(kind, victim, begins, problem)
        reader.join()
        self._heal(kind, victim, frozen)
        _, alive = psutil.wait_procs(computing, NAMED_S)
        assert not alive, f"what computed before the fault runs on: {alive}"
        back_s = until(self._is_back, BACK_S)
        assert self._answer() == self._expected
        self.report.add(kind, {"named": max(seconds.values()), "back": back_s})

    def _answer(self) -> str:
        return self._client.completions.create(
            model="m", prompt="one", max_tokens=12, temperature=0
        ).choices[0].text  # fmt: skip

    def _n_running(self) -> int:
        return int(httpx2.get(f"{self._there.address}/slots").json()["running"])

    def _is_back(self) -> bool:
        return httpx2.get(f"{self._there.address}/health").status_code == 200

    def _break(self, kind: str, victim: int) -> list[psutil.Process]:
        """Have a machine fail; return the processes that were stopped for a while."""
        process = self._there.all[victim]
        if kind == "cut":
            assert self._network is not None, "there are cables"
            self._network.cut(victim)
        elif kind == "gone":
            process.process.kill()
            process.process.wait()
        elif kind == "asleep":
            family = psutil.Process(process.process.pid)
            frozen = [family, *family.children(recursive=True)]
            for one in frozen:
                one.suspend()
            return frozen
        else:
            process.worker().send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        return []

    def _named(
        self, kind: str, victim: int, begins: Sequence[int], problem: Sequence[str]
    ) -> dict[str, float]:
        """Wait until the client and all machines name the victim; return the seconds it took."""
        begun, seconds = time.monotonic(), dict[str, float]()
        names: dict[str, Callable[[], str]] = {"client": partial(" ".join, problem)}
        names |= {
            f"machine {number}": partial(_after, process, begin)
            for number, (process, begin) in enumerate(zip(self._there.all, begins, strict=True))
            if kind not in ("gone", "asleep") or number != victim
        }
        while len(seconds) < len(names):
            for who, text in names.items():
                if who not in seconds and self._tells(who, kind, victim, text()):
                    seconds[who] = time.monotonic() - begun
            late = {who: text() for who, text in names.items() if who not in seconds}
            assert time.monotonic() < begun + NAMED_S, f"{kind} {victim} is not named by: {late}"
            time.sleep(0.02)
        return seconds

    def _tells(self, who: str, kind: str, victim: int, text: str) -> bool:
        """Return whether a text names what has failed, as far as who wrote it can know."""
        names = [f"({place.address})" for place in self._there.places]
        is_there = who == f"machine {victim}" or (who == "client" and not victim)
        if kind == "cut" and is_there:  # to whom all others are gone
            return any(name in text for n, name in enumerate(names) if n != victim)
        return names[victim] in text or (victim == 0 and "its process was" in text)

    def _heal(self, kind: str, victim: int, frozen: Sequence[psutil.Process]) -> None:
        """Undo what was done to a machine."""
        if kind == "cut":
            assert self._network is not None, "there are cables"
            self._network.mend(victim)
        elif kind == "gone":
            self._there.join_again(victim)
        for process in frozen:
            if process.is_running():
                process.resume()


def _after(process: NodeProcess, begin: int) -> str:
    """Return what a process has written behind its first characters."""
    return process.text[begin:]


if __name__ == "__main__":
    sys.exit(run_campaign(MachineFaults, __doc__ or ""))
