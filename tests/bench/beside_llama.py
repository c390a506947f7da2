"""Speeds of Tandem and llama.cpp on the same file and machine, measured in turn.

    python -m tests.bench.beside_llama PATH-TO-LLAMA-BENCH MODEL.gguf [MODEL.gguf ...]

Each round measures the one and then the other, so that a machine whose speed drifts slows both;
what counts is the median of the rounds' ratios. llama-bench starts anew in each round (it warms up
by itself); Tandem's model stays loaded meanwhile and warms up too. LOG.md says how to build
llama-bench.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine import BenchTest, Model, load_model

LOAD = """
import resource, sys, time
import engine.runtime.thread_runtime
from engine import load_model
begun = time.perf_counter()
path, n_ctx, n_threads = sys.argv[1], *map(int, sys.argv[2:])
with load_model(path, ["cpu"], n_ctx=n_ctx, cpu_threads=n_threads) as model:
    seconds = time.perf_counter() - begun
    model.logits([1])
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens per second of Tandem and of llama.cpp in one round."""

    ours: float
    peers: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peers


def peer_speeds(bench: Path, path: Path, args: argparse.Namespace) -> list[float]:
    """Return llama.cpp's tokens per second: of prefill, then of decode."""
    command = [
        str(bench), "-m", str(path), "-p", str(args.n_prompt), "-n", str(args.n_gen),
        "-t", str(args.threads), "-r", "1", "-o", "json",
    ]  # fmt: skip
    environment = os.environ | {"LD_LIBRARY_PATH": str(bench.parent)}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return [float(test["avg_ts"]) for test in json.loads(done.stdout)]


def compare(bench: Path, path: Path, args: argparse.Namespace) -> None:
    """Print both speeds of one file, round by round, and the ratios' medians."""
    tests = (BenchTest(n_prompt=args.n_prompt), BenchTest(n_gen=args.n_gen))
    rounds: list[list[Pair]] = []
    n_ctx = args.n_prompt + args.n_gen
    devices = ["cpu"] * args.ranks
    with load_model(path, devices, n_ctx=n_ctx, cpu_threads=args.threads) as model:
        for _ in range(args.rounds):
            peers = peer_speeds(bench, path, args)
            ours = [_speed(model, test) for test in tests]
            rounds.append([Pair(*both) for both in zip(ours, peers, strict=True)])
    for number, test in enumerate(tests):
        pairs = [results[number] for results in rounds]
        _report(f"{path.name} {test}", pairs)


def _speed(model: Model, test: BenchTest) -> float:
    return model.bench(test, 1).avg_ts


def _report(name: str, pairs: Sequence[Pair]) -> None:
    each = " ".join(f"{pair.ratio:.2f}" for pair in pairs)
    ours, peers = (median(getattr(pair, who) for pair in pairs) for who in ("ours", "peers"))
    ratio = median(pair.ratio for pair in pairs)
    _print(f"{name}: {ours:.2f} t/s beside {peers:.2f}, ratio {ratio:.2f} ({each})")


def compare_loading(bench: Path, path: Path, args: argparse.Namespace) -> None:
    """Print seconds and peak memory of loading and computing one token, each in a new process.

    llama-bench does not say when it has loaded, so its whole run counts.
    """
    ours, peers = [], []
    for _ in range(args.rounds):
        command = [str(bench), "-m", str(path), "-p", "1", "-n", "0", "-r", "1", "--no-warmup"]
        command += ["-t", str(args.threads)]
        environment = os.environ | {"LD_LIBRARY_PATH": str(bench.parent)}
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        peers.append(time.perf_counter() - begun)
        command = [sys.executable, "-c", LOAD, str(path), "512", str(args.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak_kib = map(float, done.stdout.split())
        ours.append((seconds, peak_kib / 1024))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    seconds = median(seconds for seconds, _ in ours)
    ratio = median(mine / theirs for (mine, _), theirs in zip(ours, peers, strict=True))
    _print(
        f"{path.name} loading: {seconds:.2f} s beside {median(peers):.2f} s (whole run), "
        f"ratio {ratio:.2f}; peak memory {median(mib for _, mib in ours):.0f} MiB, "
        f"the larger of both {peak:.0f} MiB"
    )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Tandem and llama.cpp in turn.")
    parser.add_argument("bench", type=Path, metavar="LLAMA-BENCH", help="llama.cpp's llama-bench")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument(
        "--ranks", type=int, default=1, help="virtual devices that Tandem splits over"
    )
    parser.add_argument("--load", action="store_true", help="compare loading instead")
    args = parser.parse_args()
    for path in args.models:
        (compare_loading if args.load else compare)(args.bench.resolve(), path, args)


if __name__ == "__main__":
    main()
