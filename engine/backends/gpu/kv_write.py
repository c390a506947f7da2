"""The kernel that writes keys and values to the cache, and how kernels expect the cache to lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import power_of_two
from engine.backends.gpu.kernels import kv_cells
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.launch.refusals import allows

if TYPE_CHECKING:
    from engine.backends.gpu.page_tables import PagedRows
    from engine.model.forward.cache import LayerCache

BLOCKS = {"q8_0": 34, "q4_0": 18}
"""Bytes of a block of 32 elements, by block-quantised type of keys or values."""

DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type in which keys or values are held, by their type."""

WRITTEN = 1 << 10
"""Elements that one program writes to the cache."""

LARGEST_HEAD = 1 << 12
"""Most elements of a head that one program can write."""


def write(cache: LayerCache, k: Tensor, v: Tensor | None, rows: PagedRows) -> bool:
    """Store k and v in the cache at the rows' positions; see `LayerCache.write`.

    Positions outside of the cache are skipped: the host does not know them, so it cannot check.

    Args:
        k, v: (T, heads, head_dim), F32; only the elements of a head need to lie side by side.
        rows: where the tokens lie.

    Returns:
        Whether they were stored; if not, no kernel supports the arguments.
    """
    type_k, type_v = cache.types
    if not fits(cache, k, v) or not allows(k.device, "kv_write", str(cache.types)):
        return False
    n_tokens, n_head, dim_k = k.shape
    dim_v = dim_k if v is None else v.shape[2]
    size = power_of_two(max(dim_k, dim_v))
    n_rows = n_tokens * n_head
    rows_k, n_k = _writing_programs(n_rows, dim_k, type_k, size)
    rows_v, n_v = _writing_programs(n_rows, dim_v, type_v, size)
    launch(
        kv_cells.store, (max(n_k, n_v), 1 if v is None else 2),
        *placed(k), *placed(k if v is None else v), cache.k, cache.v, rows.positions,
        rows.tables, rows.tables.shape[1], rows.n_first, n_rows, n_head, cache.k.shape[1],
        TYPE_K=type_k, TYPE_V=type_v, DIM_K=dim_k, DIM_V=dim_v,
        WIDTH_V=n_elements(cache.v.stride(1), type_v), ROWS_K=rows_k, ROWS_V=rows_v, SIZE=size,
    )  # fmt: skip
    return True


def _writing_programs(n_rows: int, dim: int, kind: str, size: int) -> tuple[int, int]:
    """Return the heads, or blocks of them, that one program writes, and how many programs do."""
    per_row, rows = (dim // 32, WRITTEN // 32) if kind in BLOCKS else (1, max(1, WRITTEN // size))
    return rows, -(-n_rows * per_row // rows)


def fits(cache: LayerCache, k: Tensor, v: Tensor | None) -> bool:
    """Return whether the kernels can write k and v to the cache."""
    for x, held, kind in zip((k, v), (cache.k, cache.v), cache.types, strict=True):
        if x is None:
            continue
        if not is_plain(x) or not holds(held, kind, cache) or x.shape[1] != held.shape[0]:
            return False
        if x.shape[2] != n_elements(held.shape[2], kind) or x.shape[2] > LARGEST_HEAD:
            return False
    return v is None or k.shape[0] == v.shape[0]


def placed(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor (T, heads, elements) and its first two strides."""
    token, head, _ = x.stride()
    return x, token, head


def holds(held: Tensor, kind: str, cache: LayerCache) -> bool:
    """Return whether keys or values of a type are on the device, as the kernels expect them."""
    head, token, step = held.stride()
    return (
        not cache.is_on_host
        and held.dtype == DTYPES[kind]
        and step == 1
        and head == held.shape[1] * token
        and (kind not in BLOCKS or token % BLOCKS[kind] == 0)
    )


def n_elements(width: int, kind: str) -> int:
    """Return the elements in a row of the cache, `width` bytes of blocks or numbers wide."""
    return width // BLOCKS[kind] * 32 if kind in BLOCKS else width


def is_plain(x: Tensor) -> bool:
    """Return whether x is F32, not empty, and its rows have no gaps."""
    return x.dtype == torch.float32 and x.numel() > 0 and x.stride(-1) == 1
