"""Seconds and peak memory of reading a model's weights, of two working copies by turns.

`python -m tests.bench.load_time MODEL OTHER_COPY [--devices cpu,cpu] [--cold] [--turns 5]` loads in
a process of its own each time; `--cold` drops the file from the system's cache before. "read" is
what `load_rank` takes, by the clock and of all processors together.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {args.other: [], HERE: []}
    for _ in range(args.turns):
        for copy, loads in found.items():
            if args.cold:
                drop_from_cache(args.model)
            command = [sys.executable, __file__, "--load", str(args.model), args.devices]
            environment = {**os.environ, "PYTHONPATH": str(copy)}
            run = subprocess.run(
                command, env=environment, cwd=copy, check=True, capture_output=True, text=True
            )
            loads.append(json.loads(run.stdout))
    before, after = found.values()
    for name in before[0]:
        old, new = ([load[name] for load in loads] for loads in (before, after))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        sys.stdout.write(
            f"{name:10} {median(old):8.2f} {median(new):8.2f}  medians; "
            f"ratio {median(ratios):.2f} ({' '.join(f'{ratio:.2f}' for ratio in ratios)})\n"
        )


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(model: str, devices: tuple[str, ...]) -> dict[str, float]:
    """Return what one load takes; runs with the engine of either copy."""
    from engine import LoadParams
    from engine.api import Model
    from engine.runtime import builder

    load, spans = builder.load_rank, []

    def timed(*args: object) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        load(*args)
        spans.append((wall, time.monotonic(), cpu, time.process_time()))

    builder.load_rank = timed
    began = time.monotonic()
    with Model(LoadParams(model, devices, n_ctx=512)):
        whole = time.monotonic() - began
    begins, ends, cpu_begins, cpu_ends = zip(*spans, strict=True)
    return {
        "read s": max(ends) - min(begins),
        "read cpu s": max(cpu_ends) - min(cpu_begins),
        "load s": whole,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        sys.stdout.write(json.dumps(measured(sys.argv[2], tuple(sys.argv[3].split(",")))))
    else:
        main()
