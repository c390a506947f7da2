"""Speed of the CPU's kernels for products and packing, beside a plain read and torch's products.

    python -m tests.bench.kernels [TYPE ...] [--threads N] [--rounds N] [--megabytes N]

Products are those of `tandem bench --kernels` (`measuring.weight_speed`), with 1, 8 and 512
tokens. In each round everything is measured once, one thing after the other, so that all share a
noisy machine's fate; the table has the medians of the rounds. GB/s are of the planes, and of the
file's bytes for packing; `read` is a sum of torch, F32 and BF16 are torch's products.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads shall sleep meanwhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.worker import Worker
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from engine.runtime.measuring.weight_speed import ONE_MATRIX_TOKENS, Probe
from tests.bench.random_blocks import random_tensor

N_ROWS, N_COLUMNS = 8192, 2048
"""Size of the matrix to pack and of torch's."""

N_TOKENS = (1, 8, 512)

HEADINGS = (
    ("", "", "pack", "", "1 token", "", "", "", "", "8 tokens", "", "", "512", "", ""),
    ("type", "bits", "GB/s", "thr", "GB/s", "read", "GFLOP/s", "F32", "BF16", "GFLOP/s", "F32",
     "BF16", "GFLOP/s", "F32", "BF16"),
)  # fmt: skip

Measure = Callable[[], float]
"""A function that does something once and returns its rate."""


class Packing:
    """A random matrix of some type, packed again and again.

    Args:
        number: number of the GGML type.
    """

    def __init__(self, number: int, n_threads: int) -> None:
        rng = np.random.default_rng(number)
        rows = random_tensor(number, (N_ROWS, N_COLUMNS), 0.02, rng)
        self._number, self._extent = number, Extent.of(0, N_COLUMNS)
        self._rows = rows.reshape(N_ROWS, -1).view(np.uint8)
        shape = (n_tiles(N_ROWS), self._extent.tile_bytes(LAYOUTS[number]))
        self._planes = torch.zeros(shape, dtype=torch.uint8)
        self._worker = Worker(n_threads)

    def bytes_per_s(self) -> float:
        """Pack the matrix once; return the bytes of the file per second."""
        return self._rows.nbytes / _seconds(self._pack)

    def _pack(self) -> None:
        pack_rows(self._rows, self._number, self._extent, self._planes, 0, self._worker)

    def close(self) -> None:
        self._worker.close()


def torchs(copies: Tensor, n_tokens: int) -> Measure:
    """Return a measure of torch's product in the type of the copies, in FLOP/s."""
    x = torch.randn(n_tokens, N_COLUMNS).to(copies.dtype)
    some = copies[:1] if n_tokens >= ONE_MATRIX_TOKENS else copies
    n_operations = 2 * N_ROWS * N_COLUMNS * n_tokens * len(some)

    def measure() -> float:
        linear(x, copies[-1])  # so that everybody is awake
        return n_operations / _seconds(lambda: [linear(x, copy) for copy in some])

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
    plain, name = others[0], TYPES[number].name
    for n_threads in all_threads:
        torch.set_num_threads(n_threads)
        with (
            closing(Packing(number, n_threads)) as packing,
            closing(Probe(name, n_threads, n_bytes)) as probe,
        ):
            measures = [packing.bytes_per_s, lambda: plain.nbytes / _seconds(plain.sum)]
            for n in N_TOKENS:
                own = partial(probe.flop_per_s, n)
                measures += [own, *(torchs(copies, n) for copies in others)]
            found = [[measure() for measure in measures] for _ in range(rounds)]
        packed, read, *products = (median(column) / 1e9 for column in zip(*found, strict=True))
        rates = [products[0] / 2 * probe.bits / 8, read, *products]
        yield [
            name, f"{probe.bits:.2f}", f"{packed:.2f}", str(n_threads),
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
