"""A rank's CPU threads, and their memory for activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from math import ceil, inf

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor
from torch.nn.functional import linear

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.products.panels import ARGUMENTS, quantised_bytes
from engine.backends.cpu.kernels.running import compiled
from engine.backends.cpu.kernels.running.fastcall import Kernel
from engine.backends.cpu.kernels.running.result_memory import GrowingMemory, free_results
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.large_pages import weight_memory
from engine.formats.quants.layout import (
    BLOCK,
    INT16_PANEL_BYTES,
    LAYOUTS,
    TILE,
    Extent,
    panel_block_bytes,
    word_tile_bytes,
)
from engine.model.forward.batch import BF16_BATCH
from engine.model.forward.expert_rows import Groups

N_TOKENS, N_COLUMNS, N_TILE = 256, 2048, 64
"""Size of the measured product: tokens, columns, row tiles."""

N_TRIES = 3
"""Number of runs; the fastest counts."""


@cache
def bf16_from(n_threads: int) -> float:
    """Return the token count from which BF16 is faster, including conversion; infinity if never."""
    int8_s, bf16_s, convert_s = _times(n_threads)
    gain_s = (int8_s - bf16_s) / N_TOKENS
    return max(BF16_BATCH, ceil(convert_s / gain_s)) if gain_s > 0 else inf


@cache
def is_bf16_fast(n_threads: int) -> bool:
    """Return whether torch's BF16 product beats our kernels for F16 and BF16."""
    x, w = torch.ones(N_TOKENS, N_COLUMNS), torch.ones(N_TILE * TILE, N_COLUMNS)
    x_bf16, w_bf16 = x.bfloat16(), w.bfloat16()
    bf16_s = _best(lambda: linear(x_bf16, w_bf16))
    own_s = _int16_s(n_threads) if chosen().has_word_dots else _best(lambda: linear(x, w))
    return bf16_s < own_s


def _int16_s(n_threads: int) -> float:
    n_blocks, y = N_COLUMNS // BLOCK, torch.empty(N_TOKENS, N_TILE * TILE)
    planes = torch.zeros(N_TILE, word_tile_bytes(n_blocks), dtype=torch.uint8)
    panels = torch.zeros(N_TOKENS * n_blocks * INT16_PANEL_BYTES, dtype=torch.uint8)
    pool, multiply = ThreadPool(n_threads), compiled.multiply_int16()

    def run() -> None:
        pool.wake()
        multiply(
            pool.address, planes.data_ptr(), planes.stride(0), n_blocks, 0, panels.data_ptr(),
            N_TOKENS, y.data_ptr(), 4 * y.shape[1], y.shape[1], N_TILE, 2, N_TOKENS,
        )  # fmt: skip

    try:
        return _best(run)
    finally:
        pool.close()


def _times(n_threads: int) -> tuple[float, float, float]:
    """Return the seconds for an INT8 product, a BF16 product, and the conversion to BF16."""
    number, extent = int(Kind.Q4_K), Extent.of(0, N_COLUMNS)
    tile_bytes = extent.tile_bytes(LAYOUTS[number])
    planes = torch.zeros(N_TILE * tile_bytes, dtype=torch.uint8)
    panels = torch.zeros(quantised_bytes(N_TOKENS, extent.n_blocks, 1), dtype=torch.uint8)
    y = torch.empty(N_TOKENS, N_TILE * TILE)
    x, w = (torch.zeros(n, N_COLUMNS, dtype=torch.bfloat16) for n in (N_TOKENS, N_TILE * TILE))
    multiply, convert = compiled.multiply(number, 1), compiled.bf16_rows(number)
    pool = ThreadPool(n_threads)
    weights = planes.data_ptr(), tile_bytes, N_COLUMNS // BLOCK, 0

    def bf16() -> None:
        pool.rest()
        linear(x, w)

    def int8() -> None:
        pool.wake()
        multiply(
            pool.address, *weights, panels.data_ptr(), N_TOKENS, y.data_ptr(), 4 * y.shape[1],
            y.shape[1], N_TILE, 2, N_TOKENS,
        )  # fmt: skip

    def to_bf16() -> None:
        pool.wake()
        convert(pool.address, *weights, 0, N_TILE, w.data_ptr())

    try:
        return _best(int8), _best(bf16), _best(to_bf16)
    finally:
        pool.close()


def _best(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(N_TRIES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class Worker:
    """One rank's threads, and their memory for activations and scratch.

    Args:
        x_bytes: bytes per quantised activation; see `cpu.kernels.products.panels`.
        fast_prompts: whether large batches are multiplied in BF16 where that is faster; a token's
            bits then depend on the batch size.

    Attributes:
        pool: the rank's threads.
        rows: activations for most quantised matrices.
        fine: two-byte activations, for matrices that need them even if `x_bytes` is 1.
        int16: activations for F16 and BF16 matrices packed as int16.
        tokens: activations for the fused FFNs of `cpu.kernels.products.experts`.
    """

    def __init__(self, n_threads: int, x_bytes: int = 1, *, fast_prompts: bool = False) -> None:
        self.pool = ThreadPool(n_threads)
        self.x_bytes = x_bytes
        self.rows = PanelRows(self.pool, x_bytes)
        self.fine = PanelRows(self.pool, 2)
        self.int16 = PackedRows(self.pool, compiled.quantise_int16_address, INT16_PANEL_BYTES)
        self.tokens = PackedRows(
            self.pool, partial(compiled.pack_each_address, x_bytes), panel_block_bytes(x_bytes)
        )
        self._all_rows = self.rows, self.fine, self.int16, self.tokens
        self._may_use_bf16 = fast_prompts and x_bytes == 1
        self._bytes = GrowingMemory(lambda n: weight_memory((n,), torch.uint8))
        self._bf16_numbers = GrowingMemory(lambda n: torch.empty(n, dtype=torch.bfloat16))
        self._f32_numbers = GrowingMemory(torch.empty)
        self._scratch = self._bytes, self._bf16_numbers, self._f32_numbers
        self._last_bf16: Tensor | None = None
        self._bf16 = torch.empty(0, 0, dtype=torch.bfloat16)

    def prepare(self) -> None:
        """Measure which GEMM is faster for prompts."""
        _ = self.bf16_from, self.is_bf16_fast

    @cached_property
    def bf16_from(self) -> float:
        """Smallest number of tokens for which quantised products use torch's BF16 GEMM."""
        return bf16_from(self.n_threads) if self._may_use_bf16 else inf

    @cached_property
    def is_bf16_fast(self) -> bool:
        """Whether long prompts use torch's BF16 GEMM for unquantised 16-bit matrices."""
        return self._may_use_bf16 and is_bf16_fast(self.n_threads)

    @cached_property
    def uses_int16(self) -> bool:
        """Whether F16 and BF16 matrices are packed as int16; see `kernels.products.int16_panels`.

        MoE models (`x_bytes` 2) do not, as routers are too sensitive to rounded activations.
        """
        return self.x_bytes == 1 and chosen().has_word_dots and not self.is_bf16_fast

    def bf16_scratch(self, n: int) -> Tensor:
        """Return a buffer for n BF16 numbers, valid until the next call."""
        return self._bf16_numbers.tensor(n)

    def f32_scratch(self, n: int) -> int:
        """Return the address of a buffer for n F32 numbers, valid until the next call."""
        return self._f32_numbers.tensor(n).data_ptr()

    def bytes_scratch(self, n: int) -> int:
        """Return the address of a buffer of n bytes, valid until the next call."""
        return self._bytes.tensor(n).data_ptr()

    @property
    def memory(self) -> Sequence[Tensor]:
        """Memory that kernels now use for small batches."""
        return self.rows.memory, self.fine.memory, self.int16.memory, self._f32_numbers.memory

    @property
    def n_threads(self) -> int:
        """Number of this rank's threads."""
        return self.pool.n_threads

    def bf16(self, x: Tensor, extent: Extent) -> Tensor:
        """Return activations x (T, columns of the extent) as BF16, padded to whole blocks."""
        if x is not self._last_bf16 or self._bf16.shape[1] != extent.n_blocks * BLOCK:
            self._bf16 = whole_blocks(x, extent).bfloat16()
            self._last_bf16 = x
        return self._bf16

    def forget(self) -> None:
        """Drop the references to the last activations."""
        for rows in self._all_rows:
            rows.forget()
        self._last_bf16 = None
        self._bf16 = torch.empty(0, 0, dtype=torch.bfloat16)

    def release(self) -> None:
        """Free the working memory."""
        self.forget()
        free_results()
        for rows in self._all_rows:
            rows.release()
        for scratch in self._scratch:
            scratch.release()

    def close(self) -> None:
        """Stop the threads; safe to call twice."""
        self.release()
        self.pool.close()


class PackedRows:
    """Memory for packed activations, which keeps the last ones for reuse.

    Several matrices often multiply the same activations (query, key and value; gate and up). The
    cache key is the tensor object: no layer modifies a tensor once it has been multiplied.

    Args:
        find_address: returns the address of the packing kernel.
        block_bytes: bytes per 32 packed activations.

    Attributes:
        memory: the packed activations.
    """

    def __init__(self, pool: ThreadPool, find_address: Callable[[], int], block_bytes: int) -> None:
        self._pool = pool
        self._find_address = find_address
        self._block_bytes = block_bytes
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._panels = self._n_bytes = 0
        self._last: Tensor | None = None
        self._last_groups: Groups | None = None
        self._last_extent = Extent(0, 0, 0, 0)
        self._rows: Tensor | None = None

    @cached_property
    def _address(self) -> int:
        return self._find_address()

    @cached_property
    def _pack(self) -> Kernel:
        return compiled.callable_at(self._address, ARGUMENTS)

    def activations(self, x: Tensor, extent: Extent) -> tuple[int, ...]:
        """Return the arguments of `multiply_all` for x (T, columns of the extent), F32.

        The caller must run that kernel, as it packs x.

        Returns:
            The arguments from `quantise` to `panels`.
        """
        n_tokens, blocks = x.shape[0], (extent.n_blocks, extent.skip)
        if self._holds(x, extent):
            return 0, 0, 0, n_tokens, *blocks, self._panels
        self._rows = rows = whole_blocks(x, extent)  # keeps it alive until the kernel has read it
        self._remember(x, extent)
        panels = self._reserve(n_tokens, extent)
        return self._address, rows.data_ptr(), 4 * rows.stride(0), n_tokens, *blocks, panels

    def _holds(self, x: Tensor, extent: Extent, groups: Groups | None = None) -> bool:
        last = self._last_extent
        is_last = x is self._last and groups is self._last_groups
        return is_last and _blocks(extent) == _blocks(last)

    def _remember(self, x: Tensor, extent: Extent, groups: Groups | None = None) -> None:
        self._last, self._last_extent, self._last_groups = x, extent, groups

    def panels(self, x: Tensor, extent: Extent) -> int:
        """Pack activations x (T, columns of the extent), F32.

        Returns:
            Address of the panels, valid until the next call.
        """
        if self._holds(x, extent):
            return self._panels
        rows, n_tokens = whole_blocks(x, extent), x.shape[0]
        address = self._reserve(n_tokens, extent)
        self._pool.wake()
        self._pack(
            self._pool.address, rows.data_ptr(), 4 * rows.stride(0), n_tokens, extent.n_blocks,
            extent.skip, address,
        )  # fmt: skip
        self._remember(x, extent)
        return address

    def _reserve(self, n_rows: int, extent: Extent) -> int:
        n_bytes = n_rows * extent.n_blocks * self._block_bytes
        if self._n_bytes < n_bytes:
            self.memory = weight_memory((n_bytes,), torch.uint8)
            self._panels, self._n_bytes = self.memory.data_ptr(), n_bytes
        return self._panels

    def forget(self) -> None:
        """Drop the references to the last activations."""
        self._last = self._rows = self._last_groups = None

    def release(self) -> None:
        """Free the memory."""
        self.forget()
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._panels = self._n_bytes = 0


class PanelRows(PackedRows):
    """Memory for quantised activations (`cpu.kernels.products.panels`), also those of experts.

    Args:
        x_bytes: bytes per activation.
    """

    def __init__(self, pool: ThreadPool, x_bytes: int) -> None:
        find_address = partial(compiled.quantise_address, x_bytes)
        super().__init__(pool, find_address, panel_block_bytes(x_bytes))
        self._x_bytes = x_bytes

    def shared_panels(self, x: Tensor, extent: Extent) -> int:
        """Quantise a single token; all rows of x (n_row, columns) are views of it.

        Returns:
            Address of the token's panels, valid until the next call.
        """
        if self._holds(x, extent):
            return self._panels
        address = self.panels(x[:1], extent)
        self._last = x
        return address

    def group_panels(self, x: Tensor, extent: Extent, groups: Groups) -> int:
        """Quantise the experts' rows x into separate panels for each expert.

        Args:
            x: rows (n_row, columns) or tokens (n_token, columns); see `Weight.grouped`.

        Returns:
            Address of the panels, valid until the next call.
        """
        if self._holds(x, extent, groups):
            return self._panels
        n_used = groups.row_of.shape[1]
        pairs = 0 if x.shape[0] == groups.n_row else groups.pair_of.data_ptr()
        rows, address = whole_blocks(x, extent), self._reserve(groups.n_row, extent)
        self._pool.wake()
        self._quantise_groups(
            self._pool.address, rows.data_ptr(), 4 * rows.stride(0), extent.n_blocks, extent.skip,
            address, pairs, n_used, groups.table.data_ptr(), len(groups.table),
        )  # fmt: skip
        self._remember(x, extent, groups)
        return address

    @cached_property
    def _quantise_groups(self) -> Kernel:
        return compiled.quantise_groups(self._x_bytes)


def _blocks(extent: Extent) -> tuple[int, int, int]:
    return extent.n_blocks, extent.skip, extent.lead


def whole_blocks(x: Tensor, extent: Extent) -> Tensor:
    """Return x (T, columns of the extent) padded with zeros to whole blocks of 32 columns."""
    is_fit = x.dim() == 2 and x.shape[1] == extent.n_columns and x.dtype is torch.float32
    assert is_fit, "kernels read memory unchecked"
    if extent.is_exact:
        return x if x.stride(-1) == 1 else x.contiguous()
    rows = x.new_zeros(x.shape[0], extent.n_blocks * BLOCK)
    rows[:, extent.lead : extent.lead + extent.n_columns] = x
    return rows
