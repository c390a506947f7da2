"""Speed of the CPU's kernels for products, beside a plain read and torch's products.

    python -m tests.bench.kernels [TYPE ...] [--threads N] [--rounds N] [--megabytes N]

For each type a matrix of 8192 × 2048, in as many copies as no cache holds, is multiplied with 1, 8
and 512 tokens; what quantises the activations counts too. In each round everything is measured
once, one thing after the other, so that all share a noisy machine's fate; the table has the medians
of the rounds. GB/s are of the planes; `read` is a sum of torch, F32 and BF16 are torch's products.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads shall sleep meanwhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.cpu.kernels import jit, pack, panels, quantised_gemm
from engine.cpu.kernels.isa import chosen
from engine.cpu.kernels.team import Team
from engine.gguf.types import TYPES
from engine.quants.codes import coded_rows
from engine.quants.layout import BLOCK, CODED, LAYOUTS, TILE
from tests.bench.random_blocks import random_tensor

N_ROWS, N_COLUMNS = 8192, 2048
N_BLOCKS, N_TILE = N_COLUMNS // BLOCK, N_ROWS // TILE
N_TOKENS = (1, 8, 512)
ONE_COPY_TOKENS = 64
"""Smallest number of tokens for which one copy is enough: weights are read once for all tokens."""

PIECE_BYTES = 128 << 10
"""Bytes of weights that a thread takes at a time."""

TOKENS_PER_PASS = 128
"""Number of tokens whose activations stay in a core's cache."""

HEADINGS = (
    ("", "", "pack", "", "1 token", "", "", "", "", "8 tokens", "", "", "512", "", ""),
    ("type", "bits", "Mw/s", "thr", "GB/s", "read", "GFLOP/s", "F32", "BF16", "GFLOP/s", "F32",
     "BF16", "GFLOP/s", "F32", "BF16"),
)  # fmt: skip

Measure = Callable[[], float]
"""A function that does something once and returns its rate."""


class Matrix:
    """Copies of a random matrix of some type, as planes, and a team that multiplies them."""

    def __init__(self, number: int, n_threads: int, n_bytes: int) -> None:
        isa, layout = chosen(), LAYOUTS[number]
        self.number = number
        self.team = Team(n_threads)
        self.tile_bytes = layout.tile_bytes(N_BLOCKS, 0)
        rng = np.random.default_rng(number)
        rows = random_tensor(number, (N_ROWS, N_COLUMNS), 0.02, rng)
        self._raw = torch.from_numpy(rows.reshape(N_ROWS, -1))
        n_copy = -(-n_bytes // (N_TILE * self.tile_bytes))
        self.planes = torch.zeros(n_copy, N_TILE * self.tile_bytes, dtype=torch.uint8)
        self._pack = _kernel(f"pack-{number}", "pack", pack, number)
        self._quantise = _kernel("panels", "quantise", panels, isa)
        self._multiply = _kernel(f"product-{number}", "multiply", quantised_gemm, isa, layout)
        self.pack()
        self.planes[1:] = self.planes[0]

    def pack(self) -> None:
        """Pack the planes of the first copy."""
        rows = coded_rows(self._raw, self.number) if self.number in CODED else self._raw
        self.team.wake()
        self._pack(
            self.team, raw=rows.data_ptr(), row_bytes=rows.shape[1], n_rows=N_ROWS, goal_row=0,
            first=0, n_blocks=N_BLOCKS, planes=self.planes.data_ptr(), tile_bytes=self.tile_bytes,
        )  # fmt: skip

    def multiply(self, copy: int, x: Tensor, numbers: Tensor, out: Tensor) -> None:
        """Multiply one copy by some tokens.

        Args:
            x: activations (tokens, `N_COLUMNS`).
            numbers: memory for the quantised activations.
            out: memory for the product (tokens, `N_ROWS`).
        """
        n_tokens, planes = len(x), self.planes[copy].data_ptr()
        per_thread = N_TILE // (2 * self.team.n_threads)
        self.team.wake()
        self._quantise(
            self.team, x=x.data_ptr(), x_stride=4 * N_COLUMNS, n_tokens=n_tokens,
            n_blocks=N_BLOCKS, panels=numbers.data_ptr(),
        )  # fmt: skip
        self._multiply(
            self.team, planes=planes, tile_bytes=self.tile_bytes, n_blocks=N_BLOCKS, skip=0,
            panels=numbers.data_ptr(), n_tokens=n_tokens, out=out.data_ptr(), out_stride=4 * N_ROWS,
            n_rows=N_ROWS, n_tile=N_TILE, tokens_per_pass=TOKENS_PER_PASS,
            tiles_per_piece=max(1, min(PIECE_BYTES // self.tile_bytes, per_thread)),
        )  # fmt: skip


def _kernel(name: str, function: str, maker: Any, *what: object) -> Callable[..., None]:
    """Return a function of a kernel module, which takes a team and the module's arguments by name.

    Args:
        name: name of the module.
        function: name of the function.
        maker: Python module that writes the kernel module.
        what: arguments of its `build`.
    """
    names = maker.ARGUMENTS
    address = jit.addresses(name, chosen(), [function], lambda m: maker.build(m, *what))[function]
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + len(names)))(address)
    return lambda team, **values: call(team.address, *(values.pop(name) for name in names))


def own(matrix: Matrix, n_tokens: int) -> Measure:
    """Return a measure of our product, in GFLOP/s."""
    x = torch.randn(n_tokens, N_COLUMNS)
    numbers = torch.zeros(panels.quantised_bytes(n_tokens, N_BLOCKS), dtype=torch.uint8)
    out = torch.empty(n_tokens, N_ROWS)
    return _rate(lambda copy: matrix.multiply(copy, x, numbers, out), len(matrix.planes), n_tokens)


def torchs(copies: Tensor, n_tokens: int) -> Measure:
    """Return a measure of torch's product in the type of the copies, in GFLOP/s."""
    x = torch.randn(n_tokens, N_COLUMNS).to(copies.dtype)
    return _rate(lambda copy: linear(x, copies[copy]), len(copies), n_tokens)


def _rate(run: Callable[[int], object], n_copy: int, n_tokens: int) -> Measure:
    copies = range(1 if n_tokens >= ONE_COPY_TOKENS else n_copy)
    n_operations = 2 * N_ROWS * N_COLUMNS * n_tokens * len(copies)

    def measure() -> float:
        run(n_copy - 1)  # so that everybody is awake
        return n_operations / _seconds(lambda: [run(copy) for copy in copies]) / 1e9

    return measure


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def rivals(n_bytes: int) -> list[Tensor]:
    """Return copies of a matrix in F32 and in BF16."""
    return [
        torch.ones(-(-n_bytes // (size * N_ROWS * N_COLUMNS)), N_ROWS, N_COLUMNS, dtype=dtype)
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2))
    ]


def rows(
    number: int, all_threads: Sequence[int], rounds: int, n_bytes: int, others: Sequence[Tensor]
) -> Iterator[list[str]]:
    """Yield the lines of one type, one for each number of threads."""
    n_weights, plain = N_ROWS * N_COLUMNS, others[0]
    for n_threads in all_threads:
        torch.set_num_threads(n_threads)
        matrix = Matrix(number, n_threads, n_bytes)
        measures: list[Measure] = [
            lambda matrix=matrix: n_weights / _seconds(matrix.pack) / 1e6,
            lambda: plain.nbytes / _seconds(plain.sum) / 1e9,
        ]
        for n_tokens in N_TOKENS:
            measures += [own(matrix, n_tokens), *(torchs(copies, n_tokens) for copies in others)]
        found = [[measure() for measure in measures] for _ in range(rounds)]
        packed, read, *products = (median(column) for column in zip(*found, strict=True))
        matrix.team.close()
        bits = 8 * matrix.tile_bytes / (TILE * N_COLUMNS)
        rates = [products[0] / 2 * bits / 8, read, *products]
        yield [
            TYPES[number].name, f"{bits:.2f}", f"{packed:.0f}", str(n_threads),
            *(f"{rate:.1f}" if rate < 99.5 else f"{rate:.0f}" for rate in rates),
        ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    numbers = {TYPES[number].name: number for number in sorted(LAYOUTS)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help=", ".join(numbers))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256, help="of weights for one token")
    args = parser.parse_args(argv)
    if unknown := set(args.types) - set(numbers):
        parser.error(f"no planes for {', '.join(sorted(unknown))}")
    doubled = [1 << n for n in range(args.threads.bit_length()) if 1 << n < args.threads]
    sys.stdout.write(f"{chosen().name}, medians of {args.rounds} rounds\n")
    for heading in HEADINGS:
        _write(heading)
    n_bytes = args.megabytes << 20
    others = rivals(n_bytes)
    for name in args.types or numbers:
        for row in rows(numbers[name], [*doubled, args.threads], args.rounds, n_bytes, others):
            _write(row)


def _write(row: Sequence[str]) -> None:
    first, *others = row
    sys.stdout.write(first.ljust(8) + "".join(text.rjust(9) for text in others) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
