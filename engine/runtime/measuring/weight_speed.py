"""Measurement of this CPU's speed with weights of each GGML type, using the models' kernels.

A CPU reads each type at a different fraction of its memory bandwidth, as unpacking takes time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.large_pages import weight_memory
from engine.backends.cpu.packing import DTYPES
from engine.backends.cpu.plain_weights import BF16_BATCH, PlainWeight
from engine.backends.cpu.weights import Int16Weight, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import BLOCK, LAYOUTS, TILE, Extent, word_tile_bytes
from engine.hardware.devices.host import usable_cores
from engine.model.forward.operands import Weight
from engine.planning.speed.facts import WeightRate

N_ROWS, N_COLUMNS = 32768, 2048
"""Size of a matrix for gemv, so large that Python's overhead is negligible."""

N_GEMM_ROWS = 8192
"""Number of rows in the matrix for GEMM."""

READ_BYTES = 512 << 20
"""Size of the weights for gemv, in bytes; more than fits in a cache."""

N_TOKENS = 256
"""Number of tokens in a GEMM."""

ONE_MATRIX_TOKENS = 64
"""Minimum number of tokens for which one matrix is enough, as it is read once for all of them."""

MIN_SECONDS = 0.25
"""Seconds for which each measurement is repeated; the median is used, since models compute on the
same noisy machine."""

MIN_REPETITIONS = 3

FILL = 0x11
"""Byte to fill weights with, an ordinary number in all types; fresh memory is one page of zeros."""

TYPE_NUMBERS = {info.name: number for number, info in TYPES.items()}
"""Numbers of all GGML types, by name."""

NUMBERS = {info.name: number for number, info in TYPES.items() if number in LAYOUTS}
"""Numbers of the GGML types that have a layout of planes, by name."""


def measurable(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of weights that have kernels, without duplicates."""
    return [kind for kind in dict.fromkeys(kinds) if kind in NUMBERS or kind in DTYPES]


def measure_weights(
    kinds: Iterable[str], n_threads: int, n_bytes: int = READ_BYTES
) -> dict[str, WeightRate]:
    """Measure each kind of weights for about a second.

    Args:
        kinds: GGML types; those without kernels are skipped.
        n_threads: number of threads that multiply.
        n_bytes: maximum size of the weights in bytes.
    """
    return {kind: _measure(kind, n_threads, n_bytes) for kind in measurable(kinds)}


def _measure(kind: str, n_threads: int, n_bytes: int) -> WeightRate:
    with closing(Probe(kind, n_threads, n_bytes)) as probe:
        flop_per_s = _median(probe.flop_per_s)
        rate = _median(probe.bytes_per_s)
        if n_threads == 1:
            return WeightRate(rate, rate, flop_per_s)
        with closing(probe.with_threads(1)) as single:
            return WeightRate(rate, min(rate, _median(single.bytes_per_s)), flop_per_s)


class Probe:
    """Matrices of one GGML type, to be multiplied repeatedly.

    Args:
        kind: name of the type.
        n_bytes: maximum size of all matrices in bytes; there is always at least one.
        memory: another probe's memory, to share its matrices; None for new ones.
        fast_prompts: see `LoadParams`.

    Attributes:
        bits: bits per weight in memory.
    """

    def __init__(
        self, kind: str, n_threads: int, n_bytes: int, memory: Tensor | None = None, *,
        fast_prompts: bool = False,
    ) -> None:  # fmt: skip
        self.kind = kind
        self._worker = Worker(n_threads, fast_prompts=fast_prompts)
        self._memory = _filled(kind, n_bytes, self._worker) if memory is None else memory
        self.bits = 8 * self._memory[0].nbytes / (N_ROWS * N_COLUMNS)
        self._weights = [_weight(kind, part, N_ROWS, self._worker) for part in self._memory]
        part = self._memory[0, : self._memory.shape[1] * N_GEMM_ROWS // N_ROWS]
        self._smaller = [_weight(kind, part, N_GEMM_ROWS, self._worker)]
        self._tokens = {n: torch.ones(n, N_COLUMNS) for n in (1, N_TOKENS)}

    def with_threads(self, n_threads: int) -> Probe:
        """Return a probe with the same matrices and another number of threads."""
        return Probe(self.kind, n_threads, 0, self._memory)

    def bytes_per_s(self) -> float:
        """Measure the weight bytes per second in gemvs with each matrix."""
        return self._memory.nbytes / _seconds(self._weights, self._tokens[1])

    def flop_per_s(self, n_tokens: int = N_TOKENS) -> float:
        """Measure the multiplications and additions per second in a GEMM.

        Few tokens are multiplied by each matrix, so that all weights come from memory; many tokens
        are multiplied by only one.
        """
        x = self._tokens.setdefault(n_tokens, torch.ones(n_tokens, N_COLUMNS))
        is_few = n_tokens < ONE_MATRIX_TOKENS
        weights, n_rows = (self._weights, N_ROWS) if is_few else (self._smaller, N_GEMM_ROWS)
        return 2 * n_tokens * n_rows * N_COLUMNS * len(weights) / _seconds(weights, x)

    def arithmetic(self, n_tokens: int) -> str:
        """Return a matmul's arithmetic: "INT8", "INT16", "BF16" or "F32"."""
        worker = self._worker
        if self.kind in NUMBERS:
            return "BF16" if n_tokens >= worker.bf16_from else "INT8"
        if _are_int16(self.kind, worker):
            return "INT16"
        is_short = self.kind != "F32" and n_tokens >= BF16_BATCH
        return "BF16" if is_short and worker.is_bf16_fast else "F32"

    def close(self) -> None:
        """Stop the threads; the matrices stay, as another probe may use them."""
        self._worker.close()


def _are_int16(kind: str, worker: Worker) -> bool:
    return kind in ("F16", "BF16") and worker.uses_int16


def _filled(kind: str, n_bytes: int, worker: Worker) -> Tensor:
    if kind in NUMBERS:
        n_row, row_bytes = (
            N_ROWS // TILE,
            Extent.of(0, N_COLUMNS).tile_bytes(LAYOUTS[NUMBERS[kind]]),
        )
    elif _are_int16(kind, worker):
        n_row, row_bytes = N_ROWS // TILE, word_tile_bytes(N_COLUMNS // BLOCK)
    else:
        n_row, row_bytes = N_ROWS, N_COLUMNS * DTYPES[kind].itemsize
    n_matrix = max(1, n_bytes // (n_row * row_bytes))
    return weight_memory((n_matrix, n_row, row_bytes), torch.uint8).fill_(FILL)


def _weight(kind: str, part: Tensor, n_rows: int, worker: Worker) -> Weight:
    if kind in NUMBERS:
        return PlaneWeight(part, NUMBERS[kind], n_rows, Extent.of(0, N_COLUMNS), worker)
    if _are_int16(kind, worker):
        return Int16Weight(part, TYPE_NUMBERS[kind], n_rows, Extent.of(0, N_COLUMNS), worker)
    return PlainWeight(part.view(DTYPES[kind]), worker)


def _seconds(weights: Sequence[Weight], x: Tensor) -> float:
    begun = time.perf_counter()
    with torch.inference_mode():
        for weight in weights:
            weight.matmul(x)
    return time.perf_counter() - begun


def _median(measure: Callable[[], float]) -> float:
    measure()
    rates: list[float] = []
    end = time.perf_counter() + MIN_SECONDS
    while len(rates) < MIN_REPETITIONS or time.perf_counter() < end:
        rates.append(measure())
    return median(rates)


FEW, MANY = 8, 512
"""Batch sizes, in tokens, to measure in addition to 1."""

ROUNDS = 5
"""Number of rounds; each measures everything once, and the medians are used."""


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """Speed of matmuls with weights of one type.

    Attributes:
        kind: name of the GGML type.
        bits: bits per weight in memory.
        n_threads: number of threads.
        instruction_set: target of the kernels, as a value of `TANDEM_CPU`.
        bytes_per_s: weight bytes per second while one token is multiplied.
        read_bytes_per_s: bytes per second in torch's sum, measured alternately with `bytes_per_s`.
        few_op_per_s: multiplications and additions per second for `FEW` tokens.
        many_op_per_s: the same for `MANY` tokens.
        arithmetic: arithmetic for `MANY` tokens: "INT8" (our kernels), "INT16" or "F32" (our
            kernels for unquantised weights) or "BF16" (torch).
    """

    kind: str
    bits: float
    n_threads: int
    instruction_set: str
    bytes_per_s: float
    read_bytes_per_s: float
    few_op_per_s: float
    many_op_per_s: float
    arithmetic: str


def product_types() -> list[str]:
    """Return the names of all types that have matmul kernels."""
    return measurable(info.name for info in TYPES.values())


def measure_products(
    kinds: Iterable[str] = (), n_threads: int | None = None, *, fast_prompts: bool = False,
    n_bytes: int = READ_BYTES,
) -> Iterator[ProductSpeed]:  # fmt: skip
    """Measure the matmuls of each type, for one or a few seconds each.

    Args:
        kinds: names of GGML types; those without kernels are skipped. Empty for all quantised types
            with kernels.
        n_threads: number of threads; None for one per core.
        fast_prompts: whether long prompts may be multiplied in BF16; see `LoadParams`.
        n_bytes: maximum size, in bytes, of the weights and of the sum's input.
    """
    n_threads = n_threads or usable_cores()
    numbers = torch.ones(n_bytes // 4)
    for kind in measurable(list(kinds) or [TYPES[number].name for number in LAYOUTS]):
        with (
            _torch_threads(n_threads),
            closing(Probe(kind, n_threads, n_bytes, fast_prompts=fast_prompts)) as probe,
        ):
            measures = (
                probe.bytes_per_s,
                lambda: _summed_bytes_per_s(numbers),
                lambda: probe.flop_per_s(FEW),
                lambda: probe.flop_per_s(MANY),
            )
            for measure in measures:
                measure()  # the first time does not count
            rounds = [[measure() for measure in measures] for _ in range(ROUNDS)]
            weights, read, few, many = (median(rates) for rates in zip(*rounds, strict=True))
            yield ProductSpeed(
                kind, probe.bits, n_threads, chosen().name, weights, read, few, many,
                probe.arithmetic(MANY),
            )  # fmt: skip


def _summed_bytes_per_s(numbers: Tensor) -> float:
    begun = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - begun)


@contextmanager
def _torch_threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
