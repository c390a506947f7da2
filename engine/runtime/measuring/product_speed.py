"""Measurement of the CPU's products with weights of each type, beside a plain sum of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import chosen
from engine.formats.gguf.types import TYPES
from engine.formats.quants.layout import LAYOUTS
from engine.hardware.devices.host import usable_cores
from engine.runtime.measuring.weight_speed import READ_BYTES, Probe, measurable

FEW, MANY = 8, 512
"""Numbers of tokens that are multiplied at once, beside one."""

ROUNDS = 5
"""Number of rounds; in each everything is measured once, and medians of them count."""


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """Speed of the products with weights of one type.

    Attributes:
        kind: name of the GGML type.
        bits: bits of a weight in memory.
        n_threads: number of threads.
        instruction_set: what kernels are compiled for, a value of `TANDEM_CPU`.
        bytes_per_s: bytes of weights per second while one token is multiplied.
        read_bytes_per_s: bytes per second of a sum of memory by torch, measured by turns with it.
        few_op_per_s: multiplications and additions per second for `FEW` tokens.
        many_op_per_s: the same for `MANY` tokens.
        arithmetic: what the product of `MANY` tokens computes in: "INT8" (kernels of Tandem),
            "INT16" or "F32" (likewise, for weights that are not quantised) or "BF16" (torch).
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
    """Return the names of all types whose products have kernels."""
    return measurable(info.name for info in TYPES.values())


def measure_products(
    kinds: Iterable[str] = (), n_threads: int | None = None, *, fast_prompts: bool = False,
    n_bytes: int = READ_BYTES,
) -> Iterator[ProductSpeed]:  # fmt: skip
    """Measure the products of each type, for a second or a few each.

    Args:
        kinds: names of GGML types; those without kernels are left out. All quantised types that
            have kernels if there are none.
        n_threads: number of threads; None for one on each core.
        fast_prompts: whether long prompts may be multiplied in BF16, see `LoadParams`.
        n_bytes: largest number of bytes of the weights, and of the sum.
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
    """Return the bytes per second of torch's sum."""
    begun = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - begun)


@contextmanager
def _torch_threads(n_threads: int) -> Iterator[None]:
    """Let torch use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
