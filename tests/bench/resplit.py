"""Cost of splitting a loaded model anew: seconds, and memory in addition to the model's own.

    python -m tests.bench.resplit MODEL.gguf

Goes from split to split with a conversation in the cache, gives up once on the way, and saves and
loads the state. Memory is the process's own (anonymous), read every few milliseconds; Linux only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine import Cancelled, Model, SamplingParams, load_model

STEPS = (
    ("3:1 to 1:1", {"split": [1, 1]}),
    ("1:1 to 1:1", {"split": [2, 2]}),
    ("1:1 to layers", {"split": [1, 1], "split_mode": "layer"}),
    ("layers to one rank", {"split": None, "devices": ["cpu"], "split_mode": "tensor"}),
    ("one rank to 3:1", {"split": [3, 1], "devices": ["cpu"] * 2}),
)
GIVE_UP_S = 0.5
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200, help="in the cache")
    args = parser.parse_args()
    begun = time.perf_counter()
    with load_model(args.model, ["cpu"] * 2, [3, 1], n_ctx=4096) as model:
        report(f"{'load':20} {time.perf_counter() - begun:6.2f} s")
        ids = list(range(5, 5 + args.tokens))
        list(model.generate(ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
        for name, how in STEPS:
            measure(name, lambda how=how: model.resplit(**how))
        measure("given up", lambda: give_up(model))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            measure("save", lambda: model.save_state(path))
            measure(f"load, {path.stat().st_size / MIB:.1f} MiB", lambda: model.load_state(path))


def give_up(model: Model) -> None:
    stop = time.perf_counter() + GIVE_UP_S
    try:
        model.resplit([1, 1], is_cancelled=lambda: time.perf_counter() > stop)
    except Cancelled:
        return
    report(f"(it was done within {GIVE_UP_S} s)")


def measure(name: str, act: Callable[[], object]) -> None:
    """Print the seconds of an action, and the process's memory before, at its peak and after."""
    before, most = anonymous(), [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    act()
    seconds = time.perf_counter() - begun
    is_over.set()
    watcher.join()
    memory = " ".join(f"{n // MIB:6}" for n in (before, max(most[0], before), anonymous()))
    report(f"{name:20} {seconds:6.2f} s   {memory} MiB before, at most, after")


def anonymous() -> int:
    """Return the anonymous memory of this process, which is in no file, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("Anonymous:"))
    return int(line.split()[1]) << 10


def report(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
