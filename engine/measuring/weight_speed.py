"""How fast this CPU multiplies with weights of each kind, by the kernels that models use.

A device reads different kinds at different parts of its memory's speed: unpacking takes time, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from statistics import median

import torch
from torch import Tensor

from engine.cpu.large_pages import weight_memory
from engine.cpu.packing import DTYPES
from engine.cpu.weights import PlainWeight, PlaneWeight
from engine.cpu.worker import Worker
from engine.forward.weight import Weight
from engine.gguf.types import TYPES
from engine.planning.speed.facts import WeightRate
from engine.quants.extent import Extent
from engine.quants.layout import LAYOUTS, TILE

N_ROWS, N_COLUMNS = 32768, 2048
"""Of a matrix: large, since Python would count for smaller ones, and answers do without it."""

N_ROWS_MANY = 8192
"""Of the matrix that is multiplied with many tokens."""

READ_BYTES = 512 << 20
"""Of weights that one token is multiplied with: more than a cache holds."""

N_TOKENS = 256
"""What counts as many."""

MIN_SECONDS = 0.25
"""Each measurement is repeated for that long; the median counts, since a model computes in just as
noisy a time."""

MIN_REPETITIONS = 3

FILL = 0x11
"""A byte of which all kinds make ordinary numbers. Fresh memory would be one page of zeros."""

NUMBERS = {info.name: number for number, info in TYPES.items() if number in LAYOUTS}


def measurable(kinds: Iterable[str]) -> list[str]:
    """Those of some kinds of weights that the kernels multiply, each once."""
    return [kind for kind in dict.fromkeys(kinds) if kind in NUMBERS or kind in DTYPES]


def measure_weights(
    kinds: Iterable[str], n_threads: int, n_bytes: int = READ_BYTES
) -> dict[str, WeightRate]:
    """Measure for about a second each.

    Args:
        kinds: GGML types; those without kernels are left out.
        n_bytes: of weights that are made for it, at most.
    """
    return {kind: _measure(kind, n_threads, n_bytes) for kind in measurable(kinds)}


def _measure(kind: str, n_threads: int, n_bytes: int) -> WeightRate:
    with closing(Probe(kind, n_threads, n_bytes)) as probe:
        many = _median(probe.flop_per_s)
        rate = _median(probe.bytes_per_s)
        if n_threads == 1:
            return WeightRate(rate, rate, many)
        with closing(probe.with_threads(1)) as single:
            return WeightRate(rate, min(rate, _median(single.bytes_per_s)), many)


class Probe:
    """Random matrices of one kind, to be multiplied again and again.

    Args:
        n_bytes: of all together, at most, but for the first.
        memory: of another probe, to use the same ones.
    """

    def __init__(
        self, kind: str, n_threads: int, n_bytes: int, memory: Tensor | None = None
    ) -> None:
        self.kind = kind
        self._memory = _filled(kind, n_bytes) if memory is None else memory
        self._worker = Worker(n_threads)
        self._weights = [_weight(kind, part, N_ROWS, self._worker) for part in self._memory]
        part = self._memory[0, : self._memory.shape[1] * N_ROWS_MANY // N_ROWS]
        self._smaller = [_weight(kind, part, N_ROWS_MANY, self._worker)]
        self._one, self._many = torch.ones(1, N_COLUMNS), torch.ones(N_TOKENS, N_COLUMNS)

    def with_threads(self, n_threads: int) -> Probe:
        """The same matrices for so many threads."""
        return Probe(self.kind, n_threads, 0, self._memory)

    def bytes_per_s(self) -> float:
        """Of weights, multiplied with one token, all of them once."""
        return self._memory.nbytes / _seconds(self._weights, self._one)

    def flop_per_s(self) -> float:
        """Multiplications and additions of one matrix with many tokens."""
        seconds = _seconds(self._smaller, self._many)
        return 2 * N_TOKENS * N_ROWS_MANY * N_COLUMNS / seconds

    def close(self) -> None:
        """End the threads; the matrices may still be another's."""
        self._worker.close()


def _filled(kind: str, n_bytes: int) -> Tensor:
    """Room for as many matrices as fit, none of them fresh memory."""
    if kind in NUMBERS:
        n_row, row_bytes = (
            N_ROWS // TILE,
            Extent.of(0, N_COLUMNS).tile_bytes(LAYOUTS[NUMBERS[kind]]),
        )
    else:
        n_row, row_bytes = N_ROWS, N_COLUMNS * DTYPES[kind].itemsize
    n_matrix = max(1, n_bytes // (n_row * row_bytes))
    return weight_memory((n_matrix, n_row, row_bytes), torch.uint8).fill_(FILL)


def _weight(kind: str, part: Tensor, n_rows: int, worker: Worker) -> Weight:
    if kind in NUMBERS:
        return PlaneWeight(part, NUMBERS[kind], n_rows, Extent.of(0, N_COLUMNS), worker)
    return PlainWeight(part.view(DTYPES[kind]), worker)


def _seconds(weights: Sequence[Weight], x: Tensor) -> float:
    begun = time.perf_counter()
    with torch.inference_mode():
        for weight in weights:
            weight.matmul(x)
    return time.perf_counter() - begun


def _median(measure: Callable[[], float]) -> float:
    """Of a rate that is measured again and again, after once that does not count."""
    measure()
    rates: list[float] = []
    end = time.perf_counter() + MIN_SECONDS
    while len(rates) < MIN_REPETITIONS or time.perf_counter() < end:
        rates.append(measure())
    return median(rates)
