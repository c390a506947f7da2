"""Softmax attention over a KV cache, computed in blocks of keys and queries.

Neither all scores nor the whole cache in F32 are materialised, because the softmax is computed
online, relative to each query's largest score so far (arXiv 1805.02867).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.forward.batch import MAX_AT_ONCE, SMALL_BATCH, Batch, Piece
from engine.model.forward.state import CPU_STEP, DEVICE_STEP

if TYPE_CHECKING:
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import Scores

Intervals = Sequence[tuple[int, int]]  # half-open intervals of positions

LOWEST = torch.finfo(torch.float32).min
"""Initial maximum score; -inf would give NaN for a query that sees no key in a block."""


def attend(
    q: Tensor, cache: LayerCache, batch: Batch, scores: Scores,
    sinks: Tensor | None, slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `Ops.attention` for q (T, n_head, head_dim); return (T, n_head, head_dim_v)."""
    parts = q.split_with_sizes([piece.n for piece in batch.pieces])
    two_way = batch.two_way(scores.window)
    results = [
        _attend_piece(part, cache, piece, scores, sinks, slopes, () if n else two_way)
        for n, (part, piece) in enumerate(zip(parts, batch.pieces, strict=True))
    ]
    return results[0] if len(results) == 1 else torch.cat(results)


def _attend_piece(
    q: Tensor, cache: LayerCache, piece: Piece, scores: Scores,
    sinks: Tensor | None, slopes: Tensor | None, two_way: Intervals,
) -> Tensor:  # fmt: skip
    n_past, stop = piece.n_past, piece.stop
    first = scores.first_visible(n_past)
    step = CPU_STEP if q.device.type == "cpu" else DEVICE_STEP
    # queries grouped by their row of keys and values: (n_row, T, size, head_dim)
    q = torch.unflatten(q * scores.scale, 1, (cache.n_row, -1)).transpose(0, 1).contiguous()
    size = q.shape[2]
    n_keys = max(1, min(step.keys // cache.width, step.scores // size))
    slopes = None if slopes is None else slopes.view(cache.n_row, 1, -1, 1)
    means = _Means(q, cache.head_dim_v, sinks)
    for start in range(first, stop, n_keys):
        keys = slice(start, min(start + n_keys, stop))
        k, v = cache.read(piece, keys.start, keys.stop)
        n_queries = max(1, step.scores // (size * n_keys))
        for queries, visible in _pieces(scores, slice(n_past, stop), keys, n_queries, two_way):
            tokens = slice(queries.start - n_past, queries.stop - n_past)
            columns = slice(visible.start - start, visible.stop - start)
            mask = hidden(scores, queries, visible, q.device, two_way)
            n_rows = max(1, step.scores // (size * _length(queries) * _length(visible)))
            for row in range(0, cache.n_row, n_rows):
                rows = slice(row, row + n_rows)
                s = _scores(q[rows, tokens], k[rows, columns], scores)
                if slopes is not None:
                    s += slopes[rows] * _distances(queries, visible, s)
                if mask is not None:
                    s.masked_fill_(mask, -torch.inf)
                means.add(rows, tokens, s, v[rows, columns])
    return means.result()


class _Means:
    """Running weighted means of the values for all queries, over the keys added so far.

    Args:
        q: queries by their row of keys, (n_row, T, size, head_dim).
        sinks: logits that take weight but have no value, (n_row × size,); or None.
    """

    def __init__(self, q: Tensor, head_dim_v: int, sinks: Tensor | None) -> None:
        n_row, n_tokens, size, _ = q.shape
        shape = (n_tokens, n_row, size)
        self._sums = q.new_zeros(*shape, head_dim_v)
        if sinks is None:
            self._top, self._weights = q.new_full((*shape, 1), LOWEST), q.new_zeros(*shape, 1)
        else:
            self._top = sinks.view(1, n_row, size, 1).repeat(n_tokens, 1, 1, 1)
            self._weights = q.new_ones(*shape, 1)

    def add(self, rows: slice, tokens: slice, s: Tensor, v: Tensor) -> None:
        """Add keys with scores s (rows, T, size, S), which are overwritten, and values v."""
        top, weights, sums = (
            whole[tokens, rows].transpose(0, 1) for whole in (self._top, self._weights, self._sums)
        )
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        s.sub_(new).exp_()
        rescale = (top - new).exp_()
        weights.mul_(rescale).add_(s.sum(-1, keepdim=True))
        sums.mul_(rescale).add_((s.flatten(1, 2) @ v).view(sums.shape))
        top.copy_(new)

    def result(self) -> Tensor:
        """Return (T, n_row × size, head_dim_v)."""
        return self._sums.div_(self._weights).flatten(1, 2)


def _pieces(
    scores: Scores, queries: slice, keys: slice, n_queries: int, two_way: Intervals
) -> Iterator[tuple[slice, slice]]:
    """Yield intervals of at most `n_queries` queries, each with the keys that any of them sees.

    Queries that see none of the keys are left out.
    """
    for start in range(queries.start, queries.stop, n_queries):
        stop = min(start + n_queries, queries.stop)
        last = max([stop, *(end for begin, end in two_way if begin < stop)])
        visible = slice(max(keys.start, scores.first_visible(start)), min(keys.stop, last))
        if visible.start < visible.stop:
            yield slice(start, stop), visible


def hidden(
    scores: Scores, queries: slice, keys: slice, device: torch.device, two_way: Intervals = ()
) -> Tensor | None:
    """Return the mask (queries, 1, keys) of keys that a query must not see; None if every query
    sees every key.

    `queries` and `keys` are intervals of positions; for `two_way` see `Batch.two_way`.
    """
    is_first_whole = keys.stop <= queries.start + 1
    if is_first_whole and scores.first_visible(queries.stop - 1) <= keys.start:
        return None
    key = torch.arange(keys.start, keys.stop, device=device)
    query = torch.arange(queries.start, queries.stop, device=device)[:, None, None]
    mask = key > query
    for begin, end in two_way:
        mask &= ~((query >= begin) & (query < end) & (key >= begin) & (key < end))
    if scores.window:
        mask |= query - key >= scores.window
    if scores.first:
        mask |= key < query.clamp(max=scores.first)
    if scores.chunk:
        mask |= query // scores.chunk != key // scores.chunk
    return mask


def _scores(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    s = (q.flatten(1, 2) @ k.transpose(1, 2)).view(*q.shape[:3], -1)
    return s.div_(scores.softcap).tanh_().mul_(scores.softcap) if scores.softcap else s


def _distances(queries: slice, keys: slice, like: Tensor) -> Tensor:
    key = torch.arange(keys.start, keys.stop, device=like.device, dtype=like.dtype)
    query = torch.arange(queries.start, queries.stop, device=like.device, dtype=like.dtype)
    return key - query[:, None, None]


def _length(interval: slice) -> int:
    return int(interval.stop - interval.start)


_thread = threading.local()


@contextmanager
def computing(batch: Batch) -> Iterator[None]:
    """Enter the computation of a batch on this thread."""
    before = is_checking()
    _thread.is_checking = batch.checks_drafts
    try:
        yield
    finally:
        _thread.is_checking = before


def is_checking() -> bool:
    """Return whether this thread verifies draft tokens, which requires the bits of single-token
    passes."""
    return getattr(_thread, "is_checking", False)


def most_few_rows() -> int:
    """Return the largest number of rows for which this thread uses the kernels for few rows."""
    return MAX_AT_ONCE if is_checking() else SMALL_BATCH
