"""Speed of the CPU's attention alone: a token and a prompt behind contexts of several lengths.

    python -m tests.bench.attention [--beside CHECKOUT] [--types f16,q8_0] [--depths 512,4096]

One token reads as many layers' caches as no processor's cache holds: its figure is GB/s of keys
and values, beside a plain sum of torch over memory. 512 tokens are told in GFLOP/s a thread, of
the products of queries and visible keys and of weights and values, beside a loop of multiply-adds
in registers. With another checkout of this repository both are measured by turns, in processes of
their own, and the line ends with the median of the rounds' ratios, the least and the largest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads shall sleep meanwhile

import torch
from llvmlite import ir

from engine.backends.cpu.kernels.cache.cache_ops import CacheOps
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import FLOATS, LANES, function
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.pages import PAGE
from engine.model.forward.state import F32_BYTES, KVState
from engine.model.sharding.shares import Ranges

ROOT = Path(__file__).resolve().parents[2]
SHAPES = "32/8x64,32/8x128,16/2x128,8/1x256"
N_PROMPT = 512
READ_BYTES = 160 << 20
"""Bytes of keys and values that single tokens read in one measurement, at least."""

MIN_S = 0.05
"""Shortest time of a measurement of a prompt, in seconds."""

SUMS = 16
"""Number of sums in registers of the loop of multiply-adds."""


class Case(NamedTuple):
    """What is measured.

    Attributes:
        heads, kv_heads, head_dim: numbers of query and of key-value heads, and of their elements.
        n_tokens, depth: number of tokens, and of those before them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_type: str
    n_tokens: int
    depth: int
    n_threads: int

    def __str__(self) -> str:
        return (
            f"{self.heads}/{self.kv_heads} x {self.head_dim:3} {self.kv_type:4} "
            f"{self.n_tokens:3} behind {self.depth:5}, {self.n_threads} threads"
        )

    @property
    def n_operations(self) -> int:
        """Number of additions and multiplications, softmax apart."""
        n_seen = self.n_tokens * self.depth + self.n_tokens * (self.n_tokens + 1) // 2
        return 4 * self.head_dim * self.heads * n_seen


class Layers:
    """Caches of layers with random contents, and a team that attends over them."""

    def __init__(self, case: Case) -> None:
        self._case = case
        heads, kv_heads = (Ranges(((0, n),), n) for n in (case.heads, case.kv_heads))
        state = KVState(heads, kv_heads, case.head_dim, case.head_dim)
        n_ctx = -(-(case.depth + case.n_tokens) // PAGE) * PAGE
        device = torch.device("cpu")
        self._held = [LayerCache(state, 0, n_ctx, case.kv_type, device)]
        if case.n_tokens == 1:
            n_copies = -(-READ_BYTES // self._held[0].n_bytes)
            more = (LayerCache(state, 0, n_ctx, case.kv_type, device) for _ in range(n_copies - 1))
            self._held.extend(more)
        self._batch = Batch.of_one(case.depth, case.n_tokens, 0)
        self._q = torch.randn(case.n_tokens, case.heads, case.head_dim)
        page = torch.randn(2, PAGE, case.kv_heads, case.head_dim)
        for held in self._held:
            held.write(page[0], page[1], Batch.of_one(0, PAGE, 0))
            for number in range(1, n_ctx // PAGE):
                held.copy_page(0, number)
        self._team = ThreadPool(case.n_threads)
        self._ops = CacheOps(self._team)

    def rate(self) -> float:
        """Return the bytes per second of a token, or the operations per second of a prompt."""
        self._attend(self._held[-1])
        if self._case.n_tokens == 1:
            n_bytes = sum(held.n_bytes for held in self._held)
            return n_bytes / _seconds(lambda: self._attend(*self._held))
        n, taken = 0, 0.0
        while taken < MIN_S:
            taken += _seconds(lambda: self._attend(self._held[0]))
            n += 1
        return n * self._case.n_operations / taken

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _attend(self, *layers: LayerCache) -> None:
        scores = Scores(self._case.head_dim**-0.5)
        for held in layers:
            out = self._ops.attention(self._q, held, self._batch, scores, None, None)
            assert out is not None


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def peak() -> float:
    """Return the operations per second of multiply-adds in one thread's registers."""
    n_turns = 1_000_000

    def build(module: ir.Module) -> None:
        code, (n, out) = function(module, "multiply_add", 2)
        factor = code.load(out, FLOATS)
        sums = [code.variable(factor * float(index)) for index in range(SUMS)]
        with code.loop(code.number(0), n):
            for total in sums:
                total.set(code.fma(total.get(), factor, factor))
        for index, total in enumerate(sums):
            code.store(total.get(), out + 4 * LANES * index)
        code.builder.ret_void()

    address = jit.addresses("multiply-add", chosen(), ["multiply_add"], build)["multiply_add"]
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)
    memory = torch.full((SUMS * LANES,), 0.5)
    return 2 * SUMS * LANES * n_turns / _seconds(lambda: run(n_turns, memory.data_ptr()))


def sum_rate(numbers: torch.Tensor, n_threads: int) -> float:
    """Return the bytes per second that torch adds up."""
    torch.set_num_threads(n_threads)
    return numbers.nbytes / _seconds(numbers.sum)


def serve() -> None:
    """Measure the cases that come as lines of JSON; a case that is the last one is not set up."""
    last, layers = None, None
    for line in sys.stdin:
        case = Case(*json.loads(line))
        if case != last:
            if layers:
                layers.close()
            last, layers = case, None
            layers = Layers(case)
        assert layers
        sys.stdout.write(f"{layers.rate()}\n")
        sys.stdout.flush()


@contextmanager
def measured_in(checkout: Path) -> Iterator[Callable[[Case], float]]:
    """Start the kernels of a checkout; yields a function that measures a case with them."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], cwd=checkout, text=True,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    to, answers = _open(process.stdin), _open(process.stdout)

    def measure(case: Case) -> float:
        to.write(json.dumps(case) + "\n")
        to.flush()
        return float(answers.readline())

    try:
        yield measure
    finally:
        to.close()
        process.wait()
        answers.close()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield what the command line asks for."""
    for kind in args.types.split(","):
        for shape in args.shapes.split(","):
            heads, kv_heads, head_dim = map(int, shape.replace("/", "x").split("x"))
            for n_tokens in map(int, args.tokens.split(",")):
                for depth in map(int, args.depths.split(",")):
                    for n in map(int, args.threads.split(",")):
                        yield Case(heads, kv_heads, head_dim, kind, n_tokens, depth, n)


def report(case: Case, rates: Sequence[Sequence[float]], base: float) -> str:
    """Return the line of a case.

    Args:
        rates: those of each round: ours, and the other checkout's if there is one.
        base: rate of a plain sum, or of a loop of multiply-adds.
    """
    unit = "GB/s, sum" if case.n_tokens == 1 else "GFLOP/s a thread, peak"
    parts = 1 if case.n_tokens == 1 else case.n_threads
    ours = median(each[0] for each in rates) / parts
    line = f"{case}: {ours / 1e9:6.1f} {unit} {base / 1e9:.1f} ({ours / base:.2f})"
    if len(rates[0]) > 1:
        ratios = sorted(each[0] / each[1] for each in rates)
        line += f"; ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    parser.add_argument("--types", default="f16,q8_0")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default=f"1,{N_PROMPT}")
    parser.add_argument("--depths", default="0,512,4096,16384")
    parser.add_argument("--threads", default=str(os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve()
        return
    numbers = torch.ones(READ_BYTES // F32_BYTES)
    checkouts = [ROOT, *([args.beside.resolve()] if args.beside else [])]
    with ExitStack() as stack:
        measures = [stack.enter_context(measured_in(checkout)) for checkout in checkouts]
        for case in cases(args):
            rounds = [[measure(case) for measure in measures] for _ in range(args.rounds)]
            bases = [
                sum_rate(numbers, case.n_threads) if case.n_tokens == 1 else peak()
                for _ in range(args.rounds)
            ]
            sys.stdout.write(report(case, rounds, max(bases)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
