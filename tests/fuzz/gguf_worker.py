"""Executes cases of the GGUF fuzzer in a child process, which a case may crash, hang or fill."""

import faulthandler
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from pathlib import Path

from engine import EngineError
from tests.fuzz.gguf_cases import SHARES, Case, make_case
from tests.fuzz.gguf_outcomes import Finding, Tally
from tests.fuzz.gguf_targets import TARGETS, WrongOutcomeError, check_sentence

SECONDS = {"header": 2.0, "plan": 10.0, "tokenizer": 5.0, "load": 5.0, "tower": 5.0}
"""Longest processor time of each target; less if it took less by the clock.

A plan opens the file five times and declares its model four times, as window and commands do.
"""

GROWTH = 256 << 20
"""Largest growth of a process's memory in one execution, in bytes."""

ADDRESSES = 3 << 30
"""Bytes of addresses that a process may get beyond those that it starts with."""

RESET_PEAK = Path("/proc/self/clear_refs")
"""File with which Linux sets a process's peak of memory back to what it takes now."""

REPORTED_EVERY = 500
"""Number of executions after which a worker tells how far it is."""


def execute(case: Case, number: int, folder: Path, tally: Tally) -> Finding | None:
    """Do with a case's files what its target does, and return what is wrong with the outcome."""
    path = case.write(folder)
    RESET_PEAK.write_text("5")
    clock, processor, memory = time.perf_counter(), time.process_time(), _peak_bytes()
    kind = details = ""
    tally.count += 1
    try:
        TARGETS[case.target](path, case.draw)
        tally.accepted += 1
    except EngineError as error:
        try:
            check_sentence(str(error))
            check_sentence(error.hint)
        except WrongOutcomeError as wrong:
            kind, details = f"{type(error).__name__}: {str(wrong)[:40]}", str(wrong)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 panics of native libraries are no Exception
        kind, details = _signature(error), traceback.format_exc()
    seconds = min(time.perf_counter() - clock, time.process_time() - processor)
    growth = _peak_bytes() - memory
    tally.add(Tally(0, 0, seconds, seconds, number))
    if not kind and growth > GROWTH:
        kind, details = f"memory of {case.target}", f"{growth >> 20} MiB"
    if not kind and seconds > SECONDS[case.target]:
        kind, details = f"slow {case.target}", f"{seconds:.1f} s"
    return Finding(number, case.target, kind, details) if kind else None


def work(
    connection: Connection, state: MutableSequence[int], seed: int, numbers: range,
    with_references: bool, folder: Path,
) -> None:  # fmt: skip
    """Execute cases one after another in a process of their own, and send tallies and findings.

    Args:
        state: shared memory: number of the present case, and nanoseconds when it began.
        folder: empty folder, in which the files of a case stay if it ends this process.
    """
    prepare(folder)
    tallies = {target: Tally() for target in SHARES}
    files = folder / "files"
    for done, number in enumerate(numbers, start=1):
        state[0], state[1] = number, time.monotonic_ns()
        case = make_case(seed, number, with_references)
        files.mkdir()
        finding = execute(case, number, files, tallies[case.target])
        shutil.rmtree(files)
        if finding is not None:
            connection.send(finding)
        if done % REPORTED_EVERY == 0 or number == numbers[-1]:
            connection.send(tallies)
            tallies = {target: Tally() for target in SHARES}
    connection.close()


def prepare(folder: Path) -> None:
    """Make this process tell how it dies, and give it a limit of memory."""
    log = (folder / "log").open("w")
    os.dup2(log.fileno(), sys.stderr.fileno())  # libraries write there before they end a process
    faulthandler.enable(log)
    warnings.simplefilter("error")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, resource.RLIM_INFINITY))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _signature(error: BaseException) -> str:
    """Return the type of an error and the innermost line of our own that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/engine/" in f.filename or "/app/" in f.filename]
    last = (ours or frames)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name} {last.name}"
