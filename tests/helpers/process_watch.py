"""Memory, threads and open files of a process and of those it starts, measured over a long time.

Python frees cycles late, and the C library keeps freed memory, so that a process's size says little
while it works. Watched processes therefore tidy up before they are measured; see `probe`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

PROBE = Path(__file__).parent / "probe"
ANSWER_S = 60.0
MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """What a process holds after it has tidied up.

    Attributes:
        rss: resident bytes.
        n_blocks: blocks of memory that Python has allocated.
        types: numbers of its objects that the garbage collector follows, by type.
    """

    rss: int
    n_threads: int
    n_files: int
    n_blocks: int
    types: Mapping[str, int] = field(default_factory=dict)


class ProcessWatch:
    """Measurements of a process tree; `environment` is for its first process.

    Attributes:
        found: measurements in order: usage by the process's name.
        at: how far the work was at each of them.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-probe-"))
        self.found: list[dict[str, Usage]] = []
        self.at: list[int] = []

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, and what makes the process and its children answer."""
        paths = [str(PROBE), os.environ.get("PYTHONPATH", "")]
        python_path = os.pathsep.join(filter(None, paths))
        return {**os.environ, "PYTHONPATH": python_path, "TANDEM_PROBE": str(self._folder)}

    def measure(self, pid: int, at: int) -> dict[str, Usage]:
        """Measure a process and its children, and note that so much work was done by then.

        Raises:
            TimeoutError: one of them does not answer.
        """
        top = psutil.Process(pid)
        usages = {"server": self._usage(top)}
        for child in top.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a helper that has just ended
                usages[_name(child)] = self._usage(child)
        self.found.append(usages)
        self.at.append(at)
        return usages

    def close(self) -> None:
        """Remove what the processes have written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _usage(self, process: psutil.Process) -> Usage:
        path = self._folder / f"{process.pid}.json"
        told = {"n_blocks": 0, "types": {}}
        if path.exists():
            path.write_text("{}")
            process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + ANSWER_S
            while "n_blocks" not in (told := json.loads(path.read_text() or "{}")):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{process} does not tidy up")
                time.sleep(0.02)
        with process.oneshot():
            return Usage(
                process.memory_info().rss, process.num_threads(), process.num_fds(), **told
            )

    def sizes(self) -> str:
        """Return the resident MiB of each process at the last measurement."""
        return ", ".join(f"{name} {one.rss / MIB:.1f}" for name, one in self.found[-1].items())

    def lines(self) -> Iterator[str]:
        """Yield for each process what it had at first and at last, and how it grew in between."""
        for name, found in self._by_name().items():
            sizes = " ".join(f"{one.rss / MIB:.1f}" for _, one in found)
            first, last = found[0][1], found[-1][1]
            yield f"{name}: resident MiB {sizes}"
            yield (
                f"  {first.n_threads} -> {last.n_threads} threads, {first.n_files} -> "
                f"{last.n_files} files, {first.n_blocks} -> {last.n_blocks} blocks; second half "
                f"{self.slope(name):+.2f} MiB, {self.slope(name, 'n_blocks'):+.0f} blocks per 1000"
            )
            grown = {kind: n - first.types.get(kind, n) for kind, n in last.types.items()}
            most = sorted(grown.items(), key=lambda item: -item[1])[:8]
            yield f"  most new objects: {', '.join(f'{kind} {n:+}' for kind, n in most)}"

    def slope(self, name: str, of: str = "rss") -> float:
        """Return a process's growth per 1000 steps in the second half, in MiB or blocks."""
        found = self._by_name()[name]
        half = found[min(len(found) // 2, max(len(found) - 2, 0)) :]
        if len({at for at, _ in half}) < 2:
            return 0.0
        values = [getattr(usage, of) for _, usage in half]
        slope = float(np.polyfit([at for at, _ in half], values, 1)[0]) * 1000
        return slope / MIB if of == "rss" else slope

    def leaks(self, most_mib: float) -> Iterator[str]:
        """Yield what grows: threads, files, and more than so many MiB per 1000 steps."""
        for name, found in self._by_name().items():
            middle, last = found[len(found) // 2][1], found[-1][1]
            if last.n_threads > middle.n_threads + 2 or last.n_files > middle.n_files + 2:
                yield f"{name} has {last.n_threads} threads and {last.n_files} files at the end"
            if (slope := self.slope(name)) > most_mib:
                yield f"{name} grows by {slope:.2f} MiB per 1000"

    def _by_name(self) -> dict[str, list[tuple[int, Usage]]]:
        """Return the measurements of each process; some are started late, or end."""
        found: dict[str, list[tuple[int, Usage]]] = {}
        for at, usages in zip(self.at, self.found, strict=True):
            for name, usage in usages.items():
                found.setdefault(name, []).append((at, usage))
        return found


def _name(process: psutil.Process) -> str:
    """Return the name of the module that a child runs, such as `engine.hosts.process.program`."""
    command: Sequence[str] = process.cmdline()
    return command[command.index("-m") + 1] if "-m" in command else process.name()
