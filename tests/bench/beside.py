"""Speeds of Tandem and another engine on the same file and machine, measured in turn.

    python -m tests.bench.beside PATH-TO-LLAMA-BENCH MODEL.gguf [MODEL.gguf ...]

The other engine is any with a `llama-bench`: llama.cpp, ik_llama.cpp and others that come from it.
Each round reads memory, then measures the one and then the other, so that a machine whose speed
drifts slows all three; what counts is the median of the rounds' ratios, with the least and the
largest beside it. llama-bench starts anew in each round (it warms up by itself); Tandem's model
stays loaded meanwhile and warms up too. Decode is also told as a share of the speed of a plain sum
over memory, for the bytes of weights that a token reads; keys and values are not counted.

`--peer-options` gives options of llama-bench, and may be repeated: the other engine counts with
the best of them in each round, as "--peer-options='-rtr 0' --peer-options='-rtr 1'" for ik.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads shall sleep meanwhile

import torch
from gguf import GGUFReader

from engine import BenchTest, Model, load_model

SUMMED = 256 << 20
"""Number of bytes of a plain sum: more than caches hold."""

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
class Round:
    """Tokens per second of Tandem and of the peer in one round, and bytes per second of a sum."""

    ours: float
    peers: float
    sums: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peers


class Peer:
    """Another engine, by its llama-bench.

    Args:
        options: lists of options, of which the best counts.
    """

    def __init__(self, bench: Path, options: Sequence[str], n_threads: int) -> None:
        self._bench, self._n_threads = bench, n_threads
        self._options = [shlex.split(each) for each in options] or [[]]
        said = subprocess.run([bench, "--help"], capture_output=True, text=True)
        self._knows_depth = "--n-depth" in said.stdout + said.stderr

    def run(self, arguments: Sequence[str | Path], options: Sequence[str] = ()) -> bytes:
        """Run llama-bench with one repetition and return what it prints."""
        command = [self._bench, *arguments, "-t", str(self._n_threads), "-r", "1", *options]
        environment = os.environ | {"LD_LIBRARY_PATH": str(self._bench.parent)}
        done = subprocess.run(command, check=True, capture_output=True, env=environment)
        return done.stdout

    def speed(self, path: Path, test: BenchTest, kv_type: str) -> float | None:
        """Return its best tokens per second; None for a test that it does not have."""
        wanted = self._arguments(test)
        if wanted is None:
            return None
        arguments = ["-m", path, *wanted, "-ctk", kv_type, "-ctv", kv_type, "-o", "json"]
        if kv_type != "f16":
            arguments += ["-fa", "1"]
        found = [json.loads(self.run(arguments, options)) for options in self._options]
        return max(float(tests[-1]["avg_ts"]) for tests in found)

    def _arguments(self, test: BenchTest) -> list[str] | None:
        plain = ["-p", str(test.n_prompt), "-n", str(test.n_gen)]
        if not test.n_depth:
            return plain
        if self._knows_depth:
            return [*plain, "-d", str(test.n_depth)]
        # ik_llama.cpp generates behind a prompt, but has no prompt behind another
        return (
            None if test.n_prompt else ["-p", "0", "-n", "0", "-gp", f"{test.n_depth},{test.n_gen}"]
        )


def token_bytes(path: Path) -> int:
    """Return the bytes of weights that a token reads: of experts the part that is used."""
    reader = GGUFReader(path)
    counts = {}
    for key, field in reader.fields.items():
        if key.endswith((".expert_count", ".expert_used_count")):
            counts[key.rpartition(".")[2]] = int(field.parts[field.data[0]][0])
    used = counts.get("expert_used_count", 1) / max(1, counts.get("expert_count", 1))
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    total = 0.0
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight" and not is_tied:
            continue
        total += tensor.n_bytes * (used if "_exps" in tensor.name else 1.0)
    return int(total)


def sum_speed(n_threads: int) -> float:
    """Return the bytes per second that torch adds up: the best of four times."""
    numbers = torch.ones(SUMMED // 4)
    n_before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        return max(_rate(lambda: numbers.sum(), SUMMED) for _ in range(4))
    finally:
        torch.set_num_threads(n_before)


def _rate(work: Callable[[], object], amount: float) -> float:
    begun = time.perf_counter()
    work()
    return amount / (time.perf_counter() - begun)


def compare(peer: Peer, path: Path, args: argparse.Namespace) -> None:
    """Print both speeds of one file for each test: medians, ratios and shares of a plain sum."""
    tests = [
        BenchTest(n_depth=depth, **amount)
        for depth in map(int, args.depths.split(","))
        for amount in ({"n_prompt": args.n_prompt}, {"n_gen": args.n_gen})
        if any(amount.values())
    ]
    rounds: dict[BenchTest, list[Round]] = {test: [] for test in tests}
    n_ctx = max(test.n_ctx for test in tests)
    devices = ["cpu"] * args.ranks
    with load_model(
        path, devices, n_ctx=n_ctx, cpu_threads=args.threads, kv_type=args.kv_type
    ) as model:
        for _ in range(args.rounds):
            sums = sum_speed(args.threads)
            for test in tests:
                peers = peer.speed(path, test, args.kv_type)
                if peers is not None:
                    rounds[test].append(Round(_speed(model, test), peers, sums))
    n_bytes = token_bytes(path)
    for test, each in rounds.items():
        _report(f"{path.name} {test}", each, n_bytes if test.n_gen else 0)


def _speed(model: Model, test: BenchTest) -> float:
    return model.bench(test, 1).avg_ts


def _report(name: str, rounds: Sequence[Round], n_bytes: int) -> None:
    """Print what one test has given.

    Args:
        n_bytes: bytes that a token reads; 0 for prompts.
    """
    if not rounds:
        _print(f"{name}: the other engine has no such test")
        return
    ours, peers = (median(getattr(each, who) for each in rounds) for who in ("ours", "peers"))
    ratios = sorted(each.ratio for each in rounds)
    line = (
        f"{name}: {ours:.2f} t/s beside {peers:.2f}, ratio {median(ratios):.2f}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    if n_bytes:
        ours, peers = (
            median(getattr(each, who) * n_bytes / each.sums for each in rounds)
            for who in ("ours", "peers")
        )
        sums = median(each.sums for each in rounds) / 1e9
        line += f"; of a plain sum's {sums:.1f} GB/s {ours:.0%} and {peers:.0%}"
    _print(line)


def compare_loading(peer: Peer, path: Path, args: argparse.Namespace) -> None:
    """Print seconds and peak memory of loading and computing one token, each in a new process.

    llama-bench does not say when it has loaded, so its whole run counts.
    """
    ours, peers = [], []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        peer.run(["-m", path, "-p", "1", "-n", "0"])
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
    """Measure each model, and print a line for each test."""
    parser = argparse.ArgumentParser(description="Measure Tandem and another engine in turn.")
    parser.add_argument("bench", type=Path, metavar="LLAMA-BENCH", help="its llama-bench")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-d", "--depths", default="0", help="tokens before, such as 0,4096")
    parser.add_argument("--kv-type", default="f16", help="type of keys and values")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--peer-options", action="append", default=[], metavar="OPTIONS")
    parser.add_argument(
        "--ranks", type=int, default=1, help="virtual devices that Tandem splits over"
    )
    parser.add_argument("--load", action="store_true", help="compare loading instead")
    args = parser.parse_args()
    peer = Peer(args.bench.resolve(), args.peer_options, args.threads)
    for path in args.models:
        (compare_loading if args.load else compare)(peer, path, args)


if __name__ == "__main__":
    main()
