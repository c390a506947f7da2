"""Time and memory of loading models, beside plain reads of the same files.

    python -m tests.bench.load FILE [FILE ...] [--other COPY] [--rounds 5] [--cold]

In each round a process of its own reads the whole file by all threads into memory that it uses
again ("cache": what the system's page cache gives), loads it, and reads it into fresh memory in
large pages ("fresh": what a load that only copied would take). So all share a noisy machine's fate;
the table has medians of the rounds. "weights" is what `load_rank` takes, by the clock, and is told
as a share of both reads; "faults" are its page faults, "peak" is the process's resident memory
beyond that before the load, as a share of the file. Another process fills memory and ends right
before, so that the host of a virtual machine need not find memory while a load is measured; that
takes ten times as long as all else. `--other` names a working copy of another
commit, which loads by turns with this one, and `--cold` drops the file from the system's cache
before each load (there is no "cache" then).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[2]

PIECE = 1 << 20
"""Bytes that a plain read brings at a time; they stay in a core's caches."""

FILL = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE)
if hasattr(mmap, "MADV_HUGEPAGE"):
    memory.madvise(mmap.MADV_HUGEPAGE)
step = bytes(1 << 20)
for at in range(0, len(memory) - len(step), len(step)):
    memory[at : at + len(step)] = step
"""
"""Program that touches memory, and ends."""

Seconds = dict[str, float]
"""What a load took, by the name of its part; also its page faults and its memory."""

STAGES = {
    "header": ("engine.formats.gguf.reader", "GGUFFile.open"),
    "tokenizer": ("engine.text.tokenizer", "Tokenizer.from_metadata"),
    "weights": ("engine.runtime.loader", "load_rank"),
    "first passes": ("engine.runtime.model_runner", "ModelRunner.warm_up"),
}
"""Parts of a load, and the function that does each: its module and its name there."""

SHOWN = ("whole", *STAGES, "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loads beside plain reads.")
    parser.add_argument("models", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--other", type=Path, help="working copy of another commit")
    parser.add_argument("--devices", default="cpu", help="device of each rank, such as cpu,cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    for model in args.models:
        found: dict[Path, list[Seconds]] = {copy: [] for copy in (args.other, HERE) if copy}
        for _ in range(args.rounds):
            for copy, loads in found.items():
                if args.cold:
                    drop_from_cache(model)
                loads.append(load_apart(copy, model, args))
        for copy, loads in found.items():
            report(f"{model.name} ({copy})", model.stat().st_size, loads)
        if args.other:
            compare(found[args.other], found[HERE])


def load_apart(copy: Path, model: Path, args: argparse.Namespace) -> Seconds:
    """Return what a load takes in a process of its own, with the engine of a working copy."""
    command = [sys.executable, __file__, "--load", str(model), args.devices, str(int(args.cold))]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    run = subprocess.run(
        command, env=environment, cwd=copy, check=True, stdout=subprocess.PIPE, text=True
    )
    loaded: Seconds = json.loads(run.stdout)
    return loaded


def report(name: str, n_bytes: int, loads: list[Seconds]) -> None:
    """Print the medians of a copy's loads."""
    middle = {key: median(load[key] for load in loads) for key in loads[0]}
    reads = [key for key in ("cache", "fresh") if key in middle]
    speeds = ", ".join(f"{key} {n_bytes / middle[key] / 1e9:.2f}" for key in (*reads, "weights"))
    shares = [
        f"{median(load[key] / load['weights'] for load in loads):.0%} of {key}" for key in reads
    ]
    lines = (
        f"{name}: {n_bytes / 1e9:.2f} GB",
        f"  GB/s: {speeds}: {', '.join(shares)}",
        "  s: " + ", ".join(f"{key} {middle[key]:.3f}" for key in SHOWN),
        f"  weights: processors {middle['cpu']:.2f} s, of these {middle['system']:.2f} in the"
        f" system; faults {middle['faults']:.0f}; peak {middle['peak'] / n_bytes:.3f} of the file",
    )
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def compare(before: list[Seconds], after: list[Seconds]) -> None:
    """Print the ratios of two copies' loads."""
    for key in ("whole", "weights", "cpu", "peak"):
        ratios = sorted(b[key] / a[key] for a, b in zip(before, after, strict=True))
        sys.stdout.write(
            f"  {key}: {median(ratios):.2f} of the other's ({ratios[0]:.2f} to {ratios[-1]:.2f})\n"
        )


def drop_from_cache(path: Path) -> None:
    """Have the system forget a file's contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(path: str, devices: tuple[str, ...], *, cold: bool) -> Seconds:
    """Return what one load takes; runs with the engine of either copy."""
    import engine.runtime.thread_runtime  # noqa: F401  reading the program is no part of a load
    from engine import LoadParams
    from engine.api import Model

    took: Seconds = {} if cold else {"cache": read_again(path)}
    watch_stages(took)
    filled = str(os.stat(path).st_size * 5 // 4)
    subprocess.run([sys.executable, "-c", FILL, filled], check=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    begun = time.perf_counter()
    with Model(LoadParams(path, devices, n_ctx=512)):
        took["whole"] = time.perf_counter() - begun
        took["peak"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    took["rest"] = took["whole"] - sum(took[stage] for stage in STAGES)
    took["fresh"] = read_into_fresh(path)
    return took


def watch_stages(took: Seconds) -> None:
    """Have each part of a load note what it takes; of parts side by side the longest counts."""
    for stage, (module, name) in STAGES.items():
        owner: Any = sys.modules[module]
        *inside, attribute = name.split(".")
        for each in inside:
            owner = getattr(owner, each)
        work = getattr(owner, attribute)
        is_bound = getattr(work, "__self__", None) is owner  # a method of the class
        timed = noting(work, stage, took)
        setattr(owner, attribute, staticmethod(timed) if is_bound else timed)


def noting(work: Callable[..., Any], stage: str, took: Seconds) -> Callable[..., Any]:
    """Return `work`, which notes what it takes under a name."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            took[stage] = max(took.get(stage, 0.0), time.perf_counter() - begun)
            if stage == "weights":
                after = resource.getrusage(resource.RUSAGE_SELF)
                system = after.ru_stime - before.ru_stime
                took["system"] = system
                took["cpu"] = after.ru_utime - before.ru_utime + system
                took["faults"] = float(after.ru_minflt - before.ru_minflt)

    return timed


def read_again(path: str) -> float:
    """Return the seconds of reading a file into memory that is used again: the best of three."""
    buffers = [bytearray(PIECE) for _ in range(n_threads())]
    return min(read(path, lambda part, _: memoryview(buffers[part])) for _ in range(3))


def read_into_fresh(path: str) -> float:
    """Return the seconds of reading a file into fresh memory, in large pages where there are."""
    n_bytes = os.stat(path).st_size
    with mmap.mmap(-1, -(-n_bytes // PIECE) * PIECE, flags=mmap.MAP_PRIVATE) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(memory) as view:
            return read(path, lambda _, at: view[at : at + PIECE])


def read(path: str, goal: Callable[[int, int], memoryview]) -> float:
    """Return the seconds in which all threads read a file.

    Args:
        goal: returns the memory for a piece, given the number of the thread and the offset.
    """
    n_bytes, n = os.stat(path).st_size, n_threads()
    share = -(-n_bytes // PIECE // n) * PIECE
    with ThreadPoolExecutor(n) as threads, open(path, "rb", 0) as file:

        def work(part: int) -> None:
            for at in range(part * share, min(n_bytes, (part + 1) * share), PIECE):
                os.preadv(file.fileno(), [goal(part, at)], at)

        list(threads.map(time.sleep, [0.01] * n))  # they have begun
        begun = time.perf_counter()
        list(threads.map(work, range(n)))
        return time.perf_counter() - begun


def n_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        taken = measured(sys.argv[2], tuple(sys.argv[3].split(",")), cold=sys.argv[4] == "1")
        sys.stdout.write(json.dumps(taken))
    else:
        main()
