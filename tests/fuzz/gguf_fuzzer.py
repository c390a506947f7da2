"""Executes hostile GGUF files: header, plan, tokenizer and load, each in an answer or a sentence.

    python -m tests.fuzz.gguf_fuzzer 1000000 --seed 1 --jobs 2

A case follows from the seed and its number; `--first` goes on where another run ended. Findings
are printed, and their files saved; a finding is an exception that is no `EngineError`, a sentence
that is not one short line, too much time or memory, and the end of the process.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.gguf_cases import SHARES, make_case
from tests.fuzz.gguf_outcomes import Finding, Tally
from tests.fuzz.gguf_worker import work

HANG_S = 60.0
"""Time by the clock after which a case is taken to hang, in seconds; the machine may be busy."""

SAVED = 3
"""Number of cases with the same cause whose files are saved."""

CONTEXT = multiprocessing.get_context("spawn")
MEMORY = Path("/dev/shm")


@dataclass
class Run:
    """The outcome of many executions so far.

    Attributes:
        tallies: executions by target.
        findings: the first findings of each kind.
        kinds: number of findings by kind.
    """

    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in SHARES})
    findings: list[Finding] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of executions."""
        return sum(tally.count for tally in self.tallies.values())

    def add(self, message: dict[str, Tally] | Finding) -> bool:
        """Add what a worker says; return whether it is a finding to be saved."""
        if isinstance(message, Finding):
            self.kinds[message.kind] += 1
            is_new = self.kinds[message.kind] <= SAVED
            if is_new:
                self.findings.append(message)
            return is_new
        for target, tally in message.items():
            self.tallies[target].add(tally)
        return False

    def lines(self) -> Iterator[str]:
        """Yield the figures of each target, and the number of findings of each kind."""
        for target, t in self.tallies.items():
            if t.count:
                yield (
                    f"{target:10} {t.count:8} executions, {t.accepted:8} accepted, "
                    f"{1e3 * t.seconds / t.count:7.2f} ms each, "
                    f"{t.slowest:.2f} s the longest (number {t.slowest_number})"
                )
        for kind, count in self.kinds.most_common():
            yield f"FINDING {count:6} x {kind}"


class Worker:
    """A child process with its share of the numbers, started again when a case ends it.

    Args:
        numbers: numbers of its cases.
        folder: folder of its own, in memory if possible.
        execute: function of the child process, such as `work`.
    """

    def __init__(
        self, seed: int, numbers: range, with_references: bool, folder: Path,
        execute: Callable[..., None],
    ) -> None:  # fmt: skip
        self._seed, self._numbers, self._with_references = seed, numbers, with_references
        self._folder, self._execute = folder, execute
        self._state = CONTEXT.RawArray("q", 2)
        self.start(numbers)

    def start(self, numbers: range) -> None:
        """Execute these cases."""
        self._numbers = numbers
        self._state[1] = 0
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self.connection, theirs = CONTEXT.Pipe(duplex=False)
        args = (theirs, self._state, self._seed, numbers, self._with_references, self._folder)
        self._process = CONTEXT.Process(target=self._execute, args=args, daemon=True)
        self._process.start()
        theirs.close()

    def end_if_it_hangs(self, hang_s: float) -> None:
        """End the process with a trace of its threads if a case takes longer than `hang_s`."""
        started = self._state[1]
        if started and time.monotonic_ns() - started > hang_s * 1e9 and self._process.pid:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGABRT)

    def restart(self) -> Finding | None:
        """Return the finding with which the process has ended, and go on behind it.

        Returns:
            None if it has come to its end.
        """
        self._process.join()
        code, number = self._process.exitcode, int(self._state[0])
        if code == 0:
            return None
        target = make_case(self._seed, number, self._with_references).target
        how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        log = self._folder / "log"
        details = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        at = self._numbers.index(number) + 1
        if self._numbers[at:]:
            self.start(self._numbers[at:])
        return Finding(number, target, f"the process ended with {how} in {target}", details)

    @property
    def is_alive(self) -> bool:
        """Whether it executes cases."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def fuzz(
    numbers: range, seed: int, jobs: int = 1, *, with_references: bool = True,
    on_finding: Callable[[Finding], object] = lambda _: None,
    on_progress: Callable[[Run], object] = lambda _: None,
    execute: Callable[..., None] = work, hang_s: float = HANG_S,
) -> Run:  # fmt: skip
    """Execute the cases of some numbers.

    Args:
        jobs: number of processes.
        with_references: whether to start from reference files as well, where there are any.
        on_finding: receiver of the first findings of each kind.
        on_progress: called now and then.
        execute: function of the child processes; see `work`.
        hang_s: time by the clock after which a case is taken to hang, in seconds.
    """
    run = Run()
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        shares = [numbers[job::jobs] for job in range(jobs)]
        workers = [
            Worker(seed, share, with_references, Path(name) / str(job), execute)
            for job, share in enumerate(shares)
            if share
        ]
        try:
            while workers:
                by_connection = {worker.connection: worker for worker in workers}
                for connection in wait(list(by_connection), timeout=1.0):
                    worker = by_connection[connection]  # type: ignore[index]
                    message = _received(connection)
                    if message is None:
                        message = worker.restart()
                        if not worker.is_alive:
                            workers.remove(worker)
                    if message is not None and run.add(message):
                        on_finding(message)
                for worker in workers:
                    worker.end_if_it_hangs(hang_s)
                on_progress(run)
        finally:
            for worker in workers:
                worker.close()
    return run


def _received(connection: Any) -> Any:
    """Return what a worker says; None once it has ended."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def save(finding: Finding, seed: int, with_references: bool, folder: Path) -> Path:
    """Write the files and the details of a finding into a folder of their own."""
    place = folder / f"{finding.target}-{seed}-{finding.number}"
    place.mkdir(parents=True, exist_ok=True)
    case = make_case(seed, finding.number, with_references)
    case.write(place)
    text = f"{finding.kind}\nfirst file {case.first}, draw {case.draw}\n\n{finding.details}"
    (place / "finding.txt").write_text(text)
    return place


def main() -> None:
    """Run the command line; exit with status 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("executions", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--save", type=Path, default=Path("findings"), help="folder for findings")
    parser.add_argument("--no-references", action="store_true", help="start from made files alone")
    args = parser.parse_args()
    with_references = not args.no_references
    started, shown = time.monotonic(), 0.0

    def on_finding(finding: Finding) -> None:
        place = save(finding, args.seed, with_references, args.save)
        _say(f"{place}: {finding.kind}\n{finding.details}")

    def on_progress(run: Run) -> None:
        nonlocal shown
        seconds = time.monotonic() - started
        if seconds - shown >= 60:
            shown = seconds
            _say(f"{run.count} executions in {seconds:.0f} s, {sum(run.kinds.values())} findings")

    run = fuzz(
        range(args.first, args.first + args.executions), args.seed, args.jobs,
        with_references=with_references, on_finding=on_finding, on_progress=on_progress,
    )  # fmt: skip
    seconds = time.monotonic() - started
    for line in run.lines():
        _say(line)
    rate, findings = run.count / seconds, sum(run.kinds.values())
    _say(f"{run.count} executions in {seconds:.0f} s ({rate:.0f} a second), {findings} findings")
    sys.exit(1 if findings else 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
