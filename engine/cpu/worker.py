"""Threads of a rank on the CPU, and their memory for activations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from engine.cpu import gemm_choice
from engine.cpu.kernels import compiled
from engine.cpu.kernels.fastcall import Kernel
from engine.cpu.kernels.isa import chosen
from engine.cpu.kernels.result_memory import free_results
from engine.cpu.kernels.team import Team
from engine.forward.expert_rows import Groups
from engine.quants.extent import WORD_PANEL_BYTES, Extent, panel_block_bytes
from engine.quants.layout import BLOCK


class Worker:
    """Threads of one rank and its memory for quantised activations.

    Several matrices often multiply the same activations (queries, keys and values; gate and up), so
    those that were quantised last are kept. They belong to one tensor object, which no layer
    changes once it has been multiplied.

    Args:
        x_bytes: bytes of a quantised activation; two where a small error can have large
            consequences, see `engine.cpu.kernels.panels`.
        fast_prompts: whether many tokens are multiplied in BF16 where that is faster; their bits
            then depend on how many there are.

    Attributes:
        team: the rank's threads.
        words: activations for products with matrices of words.
    """

    def __init__(self, n_threads: int, x_bytes: int = 1, *, fast_prompts: bool = False) -> None:
        self.team = Team(n_threads)
        self._address = self.team.address
        self.x_bytes = x_bytes
        self.words = WordRows(self.team)
        self._may_use_bf16 = fast_prompts and x_bytes == 1
        self._quantise = compiled.quantise(x_bytes)
        self._quantise_address = compiled.quantise_address(x_bytes)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._panels = self._n_bytes = 0
        self._token_bytes = panel_block_bytes(x_bytes)
        self._bf16_scratch = torch.empty(0, dtype=torch.bfloat16)
        self._f32_scratch = torch.empty(0)
        self._last: Tensor | None = None
        self._last_groups: Groups | None = None
        self._rows: Tensor | None = None
        self._last_bf16: Tensor | None = None
        self._bf16 = torch.empty(0, 0, dtype=torch.bfloat16)
        self._last_extent = Extent(0, 0, 0, 0)

    def prepare(self) -> None:
        """Measure now which GEMM is faster for prompts."""
        _ = self.bf16_from, self.is_bf16_fast

    @cached_property
    def bf16_from(self) -> float:
        """Smallest number of tokens for which quantised products use torch's BF16 GEMM."""
        return gemm_choice.bf16_from(self.n_threads) if self._may_use_bf16 else inf

    @cached_property
    def is_bf16_fast(self) -> bool:
        """Whether long prompts use torch's BF16 GEMM for unquantised 16-bit matrices."""
        return self._may_use_bf16 and gemm_choice.is_bf16_fast(self.n_threads)

    @cached_property
    def uses_words(self) -> bool:
        """Whether F16 and BF16 matrices become words, see `engine.cpu.kernels.words`.

        Routers are too sensitive to rounded activations.
        """
        return self.x_bytes == 1 and chosen().has_word_dots and not self.is_bf16_fast

    def bf16_scratch(self, n: int) -> Tensor:
        """Return memory for n BF16 numbers, valid until the next call."""
        if self._bf16_scratch.numel() < n:
            self._bf16_scratch = torch.empty(n, dtype=torch.bfloat16)
        return self._bf16_scratch

    def f32_scratch(self, n: int) -> int:
        """Return the address of memory for n F32 numbers, valid until the next call."""
        if self._f32_scratch.numel() < n:
            self._f32_scratch = torch.empty(n)
        return self._f32_scratch.data_ptr()

    @property
    def memory(self) -> Sequence[Tensor]:
        """Memory that kernels currently use for small batches."""
        return self._memory, self._f32_scratch, self.words.memory

    @property
    def n_threads(self) -> int:
        """Number of threads of the rank."""
        return self.team.n_threads

    def activations(self, x: Tensor, extent: Extent) -> tuple[int, ...]:
        """Return the arguments of `multiply_all` for x (T, columns of the extent), F32.

        The caller must run that kernel: it quantises x, which counts as quantised from now on.

        Returns:
            Its arguments from `quantise` to `panels`.
        """
        n_tokens, blocks = x.shape[0], (extent.n_blocks, extent.skip)
        if self._holds(x, extent):
            return 0, 0, 0, n_tokens, *blocks, self._panels
        self._rows = rows = whole_blocks(x, extent)  # kept until the kernel has read it
        self._remember(x, extent)
        panels = self._reserve(n_tokens, extent)
        stride = 4 * rows.stride(0)
        return self._quantise_address, rows.data_ptr(), stride, n_tokens, *blocks, panels

    def _holds(self, x: Tensor, extent: Extent, groups: Groups | None = None) -> bool:
        """Return whether the panels hold x, for experts in the order of `groups`."""
        last = self._last_extent
        is_last = x is self._last and groups is self._last_groups
        return is_last and _blocks(extent) == _blocks(last)

    def _remember(self, x: Tensor, extent: Extent, groups: Groups | None = None) -> None:
        """Remember what the panels hold."""
        self._last, self._last_extent, self._last_groups = x, extent, groups

    def panels(self, x: Tensor, extent: Extent) -> int:
        """Quantise activations x (T, columns of the extent), F32.

        Returns:
            Address of the panels, valid until the next call.
        """
        if self._holds(x, extent):
            return self._panels
        rows, n_tokens = whole_blocks(x, extent), x.shape[0]
        address = self._reserve(n_tokens, extent)
        self.team.wake()
        self._quantise(
            self._address, rows.data_ptr(), 4 * rows.stride(0), n_tokens, extent.n_blocks,
            extent.skip, address,
        )  # fmt: skip
        self._remember(x, extent)
        return address

    def shared_panels(self, x: Tensor, extent: Extent) -> int:
        """Quantise one token, of which all rows of x (n_row, columns) are views.

        Returns:
            Address of the token's panels, valid until the next call.
        """
        if self._holds(x, extent):
            return self._panels
        address = self.panels(x[:1], extent)
        self._last = x
        return address

    def bf16(self, x: Tensor, extent: Extent) -> Tensor:
        """Return activations x (T, columns of the extent) in BF16, padded to whole blocks."""
        if x is not self._last_bf16 or self._bf16.shape[1] != extent.n_blocks * BLOCK:
            self._bf16 = whole_blocks(x, extent).bfloat16()
            self._last_bf16 = x
        return self._bf16

    def group_panels(self, x: Tensor, extent: Extent, groups: Groups) -> int:
        """Quantise the rows of experts x, each expert's rows by themselves.

        Args:
            x: rows, (n_row, columns), or tokens, (n_token, columns), see `Weight.grouped`.

        Returns:
            Address of the panels, valid until the next call.
        """
        if self._holds(x, extent, groups):
            return self._panels
        n_used = groups.row_of.shape[1]
        pairs = 0 if x.shape[0] == groups.n_row else groups.pair_of.data_ptr()
        rows, address = whole_blocks(x, extent), self._reserve(groups.n_row, extent)
        self.team.wake()
        self._quantise_groups(
            self._address, rows.data_ptr(), 4 * rows.stride(0), extent.n_blocks, extent.skip,
            address, pairs, n_used, groups.table.data_ptr(), len(groups.table),
        )  # fmt: skip
        self._remember(x, extent, groups)
        return address

    def _reserve(self, n_rows: int, extent: Extent) -> int:
        """Return the address of memory for the panels of `n_rows` rows; allocate it if needed."""
        n_bytes = n_rows * extent.n_blocks * self._token_bytes
        if self._n_bytes < n_bytes:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8)
            self._panels, self._n_bytes = self._memory.data_ptr(), n_bytes
        return self._panels

    @cached_property
    def _quantise_groups(self) -> Kernel:
        """Kernel that quantises the rows of each expert."""
        return compiled.quantise_groups(self.x_bytes)

    def forget(self) -> None:
        """Release the last activations."""
        self.words.forget()
        self._last = self._rows = self._last_bf16 = self._last_groups = None
        self._bf16 = torch.empty(0, 0, dtype=torch.bfloat16)

    def release(self) -> None:
        """Free the working memory."""
        self.forget()
        free_results()
        self.words.release()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._panels = self._n_bytes = 0
        self._bf16_scratch = torch.empty(0, dtype=torch.bfloat16)
        self._f32_scratch = torch.empty(0)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self.release()
        self.team.close()


class WordRows:
    """Memory for the activations in words that were packed last, see `engine.cpu.kernels.words`.

    Matrices of words have whole blocks of columns.

    Attributes:
        memory: what kernels read.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._last: Tensor | None = None
        self._rows: Tensor | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)

    def activations(self, x: Tensor, extent: Extent) -> tuple[int, ...]:
        """Return the arguments of `multiply_all`, see `Worker.activations`."""
        n_tokens, n_blocks = x.shape[0], extent.n_blocks
        if x is self._last:
            return 0, 0, 0, n_tokens, n_blocks, 0, self.memory.data_ptr()
        return compiled.quantise_words_address(), *self._packing(x, extent)

    def panels(self, x: Tensor, extent: Extent) -> int:
        """Pack activations x (T, columns of the extent), F32.

        Returns:
            Address of the panels, valid until the next call.
        """
        if x is not self._last:
            arguments = self._packing(x, extent)
            self._team.wake()
            compiled.quantise_words()(self._team.address, *arguments)
        return self.memory.data_ptr()

    def _packing(self, x: Tensor, extent: Extent) -> tuple[int, ...]:
        """Return the arguments of the kernel that packs x, which counts as packed from now on."""
        n_tokens, n_blocks = x.shape[0], extent.n_blocks
        is_fit = x.dim() == 2 and x.shape[1] == extent.n_columns and x.dtype is torch.float32
        assert is_fit, "kernels read memory unchecked"
        assert extent.is_exact, "kernels read whole blocks"
        rows = x if x.stride(1) == 1 else x.contiguous()
        n_bytes = n_tokens * n_blocks * WORD_PANEL_BYTES
        if len(self.memory) < n_bytes:
            self.memory = torch.empty(n_bytes, dtype=torch.uint8)
        self._last, self._rows = x, rows  # kept until the kernel has read them
        return rows.data_ptr(), 4 * rows.stride(0), n_tokens, n_blocks, 0, self.memory.data_ptr()

    def forget(self) -> None:
        """Release the last activations."""
        self._last = self._rows = None

    def release(self) -> None:
        """Free the memory."""
        self.forget()
        self.memory = torch.empty(0, dtype=torch.uint8)


def _blocks(extent: Extent) -> tuple[int, int, int]:
    """Return what panels depend on."""
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
