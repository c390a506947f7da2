"""Measured choice between our INT8 GEMM and torch's BF16 GEMM for prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import ceil, inf

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch.nn.functional import linear

from engine.backends.cpu.kernels import compiled
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.products.panels import quantised_bytes
from engine.backends.cpu.kernels.running.team import Team
from engine.formats.quants.extent import WORD_PANEL_BYTES, Extent, word_tile_bytes
from engine.formats.quants.layout import BLOCK, LAYOUTS, TILE
from engine.model.forward.batch_sizes import BF16_BATCH

N_TOKENS, N_COLUMNS, N_TILE = 256, 2048, 64
"""Size of the measured product: tokens, columns of the matrix, tiles of its rows."""

N_TRIES = 3
"""Number of runs, of which the fastest counts."""


@cache
def bf16_from(n_threads: int) -> float:
    """Return the smallest number of tokens for which BF16 is faster, conversion included.

    Returns:
        Infinity if BF16 is never faster.
    """
    int8_s, bf16_s, convert_s = _times(n_threads)
    gain_s = (int8_s - bf16_s) / N_TOKENS
    return max(BF16_BATCH, ceil(convert_s / gain_s)) if gain_s > 0 else inf


@cache
def is_bf16_fast(n_threads: int) -> bool:
    """Return whether torch multiplies BF16 faster than our kernels multiply F16 and BF16."""
    x, w = torch.ones(N_TOKENS, N_COLUMNS), torch.ones(N_TILE * TILE, N_COLUMNS)
    x_bf16, w_bf16 = x.bfloat16(), w.bfloat16()
    bf16_s = _best(lambda: linear(x_bf16, w_bf16))
    own_s = _words_s(n_threads) if chosen().has_word_dots else _best(lambda: linear(x, w))
    return bf16_s < own_s


def _words_s(n_threads: int) -> float:
    """Return the seconds of a product in words."""
    n_blocks, y = N_COLUMNS // BLOCK, torch.empty(N_TOKENS, N_TILE * TILE)
    planes = torch.zeros(N_TILE, word_tile_bytes(n_blocks), dtype=torch.uint8)
    panels = torch.zeros(N_TOKENS * n_blocks * WORD_PANEL_BYTES, dtype=torch.uint8)
    team, multiply = Team(n_threads), compiled.multiply_words()

    def run() -> None:
        team.wake()
        multiply(
            team.address, planes.data_ptr(), planes.stride(0), n_blocks, 0, panels.data_ptr(),
            N_TOKENS, y.data_ptr(), 4 * y.shape[1], y.shape[1], N_TILE, 2, N_TOKENS,
        )  # fmt: skip

    try:
        return _best(run)
    finally:
        team.close()


def _times(n_threads: int) -> tuple[float, float, float]:
    """Return the seconds of an INT8 product, of a BF16 one, and of the conversion to BF16."""
    number, extent = int(Kind.Q4_K), Extent.of(0, N_COLUMNS)
    tile_bytes = extent.tile_bytes(LAYOUTS[number])
    planes = torch.zeros(N_TILE * tile_bytes, dtype=torch.uint8)
    panels = torch.zeros(quantised_bytes(N_TOKENS, extent.n_blocks, 1), dtype=torch.uint8)
    y = torch.empty(N_TOKENS, N_TILE * TILE)
    x, w = (torch.zeros(n, N_COLUMNS, dtype=torch.bfloat16) for n in (N_TOKENS, N_TILE * TILE))
    multiply, convert = compiled.multiply(number, 1), compiled.bf16_rows(number)
    team = Team(n_threads)
    weights = planes.data_ptr(), tile_bytes, N_COLUMNS // BLOCK, 0

    def bf16() -> None:
        team.rest()
        linear(x, w)

    def int8() -> None:
        team.wake()
        multiply(
            team.address, *weights, panels.data_ptr(), N_TOKENS, y.data_ptr(), 4 * y.shape[1],
            y.shape[1], N_TILE, 2, N_TOKENS,
        )  # fmt: skip

    def to_bf16() -> None:
        team.wake()
        convert(team.address, *weights, 0, N_TILE, w.data_ptr())

    try:
        return _best(int8), _best(bf16), _best(to_bf16)
    finally:
        team.close()


def _best(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some runs, after a warm-up run."""
    run()
    times = []
    for _ in range(N_TRIES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
