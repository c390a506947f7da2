"""Working memory of one layer's attention on a rank: results of parts of the keys, to be merged."""

from __future__ import annotations

from typing import NamedTuple

from engine.hardware.devices.host import usable_cores
from engine.model.forward.batch import MOST_AT_ONCE
from engine.model.forward.batch_sizes import SMALL_BATCH
from engine.model.forward.pages import PAGE
from engine.model.forward.state import (
    ATTENTION_BLOCK,
    ATTENTION_HEADS,
    ATTENTION_RESULTS_BYTES,
    ATTENTION_TILE_BYTES,
    ATTENTION_VECTOR_BYTES,
    F32_BYTES,
)

SHARED_ROWS = 10 << 10
"""Most rows (tokens times heads) whose keys are shared out to several programs: 64 for each of
a GPU's 160 multiprocessors."""


class AttentionSize(NamedTuple):
    """Sizes that decide the working memory of one layer's attention on a rank.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key-value heads.
        row: number of elements of a key and its value.
        is_shared: whether values are part of the keys.
    """

    heads: int
    kv_heads: int
    row: int
    is_shared: bool


def pieces_bytes(cache: AttentionSize, n_tokens: int, n_ctx: int, are_singles: bool = False) -> int:
    """Return the bytes of attention's partial results, one for each piece of the keys.

    See `engine.backends.gpu.attention`.
    """
    n_rows, n_ctx = n_tokens * cache.heads, -(-n_ctx // PAGE) * PAGE
    if n_tokens <= SMALL_BATCH or are_singles:
        n_piece = min(-(-n_ctx // 64), 64 + max(0, -(-(n_ctx - 64 * 64) // 256)))
    elif n_rows <= SHARED_ROWS:
        n_piece = min(-(-n_ctx // 512), 32)
    else:
        return 0
    width = cache.row if cache.is_shared else cache.row // 2
    return F32_BYTES * n_rows * n_piece * (width + 2)


def pages_bytes(cache: AttentionSize, n_ctx: int) -> int:
    """Return the bytes of attention on the CPU beside queries and results, at most.

    These are each thread's scratch memory for a tile, with the keys and values of a block, and the
    results of few tokens for all pages; see `engine.backends.cpu.kernels.cache.query_heads`.
    """
    width = cache.row if cache.is_shared else cache.row // 2
    result = result_bytes(width)
    n_results = MOST_AT_ONCE * cache.heads * -(-n_ctx // PAGE)
    per_head = F32_BYTES * width + 2 * result
    group = min(-(-cache.heads // cache.kv_heads), ATTENTION_HEADS)
    scratch = max(ATTENTION_TILE_BYTES, group * per_head)
    scratch += F32_BYTES * ATTENTION_BLOCK * (ATTENTION_HEADS + 2 * width)
    return usable_cores() * scratch + min(ATTENTION_RESULTS_BYTES, n_results * result)


def result_bytes(width: int) -> int:
    """Return the bytes of a result of attention for one page: whole vectors, and one more."""
    return (-(-F32_BYTES * width // ATTENTION_VECTOR_BYTES) + 1) * ATTENTION_VECTOR_BYTES
