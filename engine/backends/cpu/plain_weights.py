"""Unquantised matrices (F16, BF16, F32) for the CPU kernels, stored as in the file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.backends.cpu.kernels.running import compiled
from engine.backends.cpu.kernels.running.result_memory import result
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.worker import Worker
from engine.backends.reference.weights import gathered_rows
from engine.formats.quants.layout import BF16_CHUNK
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import ALL

PIECE_BYTES = 128 << 10
"""Weight bytes per piece for few tokens: enough for prefetching, few enough for balance."""

PIECE_OUTPUTS = 192
"""Result elements per piece for many tokens."""

PASS_BYTES = 192 << 10
"""Bytes of activations per pass over a piece's weights, which fit in a core's cache."""

TOKEN_UNIT, OUTPUT_UNIT = 12, 48
"""Units for the tokens in a pass and the elements in a piece: whole register tiles."""

FEW_TOKENS = 8
"""Up to this many tokens, reading the weights limits products."""

BF16_BATCH = 17
"""Smallest number of tokens for which torch's BF16 product is used, if fast prompts are on."""

KINDS: Mapping[torch.dtype, str] = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32",
}  # fmt: skip
"""Kernel name for each type of unquantised weights."""


def float_product(
    pool: ThreadPool, data: Tensor, x: Tensor, y: Tensor, *, transposed: bool = False
) -> None:
    """Multiply each head's rows by its matrix, into y: `x Wᵀ`, or `x W` if transposed.

    Args:
        data: one matrix per head, (n_head, n_rows, n_columns), with a type in `KINDS`.
        x: rows, (T, n_head, n_in), F32.
        y: results, (T, n_head, n_out), F32, with contiguous rows.
    """
    n_tokens, n_heads, n_in = x.shape
    n_out = y.shape[2]
    if data.stride(-1) != 1:
        data = data.contiguous()
    if x.stride(-1) != 1:
        x = x.contiguous()
    shape = data.shape[1:]
    assert shape == ((n_in, n_out) if transposed else (n_out, n_in)), "kernels read unchecked"
    assert x.dtype is y.dtype is torch.float32, "kernels read unchecked"
    assert n_heads == len(data) == y.shape[1], "kernels read unchecked"
    size = data.element_size()
    pool.wake()
    compiled.multiply_plain(KINDS[data.dtype], transposed=transposed)(
        pool.address, data.data_ptr(), size * data.stride(1), *shape, x.data_ptr(),
        4 * x.stride(0), n_tokens, y.data_ptr(), 4 * y.stride(0),
        *_piece_sizes(pool, n_tokens, n_heads * n_out, n_out, n_in * size, 4 * n_in), n_heads,
        size * data.stride(0), 4 * x.stride(1), 4 * y.stride(1),
    )  # fmt: skip


def _piece_sizes(
    pool: ThreadPool, n_tokens: int, n_all: int, n_out: int, w_bytes: int, x_bytes: int
) -> tuple[int, int]:
    """Return the numbers of result elements and tokens per piece.

    Args:
        n_all: result elements per token, over all heads.
        n_out: result elements per token and head.
        w_bytes: weight bytes per result element.
        x_bytes: bytes per token.
    """
    is_few = n_tokens <= FEW_TOKENS
    fit = PIECE_BYTES // max(1, w_bytes) if is_few else PIECE_OUTPUTS
    n_outputs = max(1, min(fit, n_all // (2 * pool.n_threads), n_out))
    n_outputs = n_outputs // OUTPUT_UNIT * OUTPUT_UNIT or n_outputs
    return n_outputs, max(1, PASS_BYTES // max(1, x_bytes) // TOKEN_UNIT) * TOKEN_UNIT


class PlainWeight:
    """An unquantised matrix (F16, BF16 or F32) stored as in the file, or one per expert or head.

    Args:
        data: values, (n_out, n_in) or (n, n_out, n_in).
    """

    def __init__(self, data: Tensor, worker: Worker) -> None:
        self.data = data
        self.worker = worker

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        data, worker = self.data, self.worker
        is_short = data.dtype != torch.float32
        if x.shape[0] >= BF16_BATCH and is_short and worker.is_bf16_fast:
            return self._bf16_product(x.bfloat16())
        y = result(x.shape[0], data.shape[0])
        float_product(worker.pool, data[None], x[:, None], y[:, None])
        return y

    def _bf16_product(self, x: Tensor) -> Tensor:
        self.worker.pool.rest()
        if self.data.dtype == torch.bfloat16:
            return linear(x, self.data).float()
        n_rows, n_columns = self.data.shape
        step = max(1, BF16_CHUNK // n_columns)
        y = torch.empty(x.shape[0], n_rows)
        for start in range(0, n_rows, step):
            rows = self.data[start : start + step].bfloat16()
            y[:, start : start + step] = linear(x, rows)
        return y

    def lookup(self, ids: Tensor) -> Tensor:
        data = self.data
        return gathered_rows(ids, len(data), lambda rows: data.index_select(0, rows).float())

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        if x.shape[0] != groups.n_row:
            x = groups.rows(x)
        return torch.cat([self._matrix(expert).matmul(x[rows]) for expert, rows in groups])

    def _matrix(self, index: int) -> PlainWeight:
        return PlainWeight(self.data[index], self.worker)

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        matrices = self.data[:, rows]
        n_out = matrices.shape[2 if transposed else 1]
        y = torch.empty(x.shape[0], x.shape[1], n_out)
        float_product(self.worker.pool, matrices, x, y, transposed=transposed)
        return y
