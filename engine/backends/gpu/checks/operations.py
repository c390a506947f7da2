"""Checks of what stands between products: norms, activations, states, attention, routing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.backends.gpu.checks.comparison import (
    EXACT,
    IN_F32,
    KV_BARS,
    OF_SEVERAL,
    Bar,
    Pair,
)
from engine.backends.gpu.checks.products import attached_rows
from engine.backends.gpu.routing import DeviceGroups
from engine.model.forward.batch import Batch
from engine.model.forward.ops import REFERENCE

if TYPE_CHECKING:
    from engine.backends.gpu.ops import GpuOps
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.expert_rows import Groups
    from engine.model.forward.operands import PlacedStates, Routing, Scores

STATE_AT = {"causal_conv": 1, "delta_net": 1, "selective_scan": 7, "state_space_scan": 1}
"""Index of the argument that is updated in place, by the name of the operation."""

OF_STATES = Bar(0.02, 5e-3)
"""Bar of recurrent operations: each token goes on with the errors of those before."""

LEAST_PAST = 300
"""Cached tokens before those that attend, if there is room: some pieces of keys, one not full."""


def in_f32(ops: GpuOps, name: str, *args: Any, **named: Any) -> list[Pair]:
    """Check an operation without weights in planes and without a state."""
    found = _listed(getattr(ops, name)(*args, **named))
    expected = _listed(getattr(REFERENCE, name)(*args, **named))
    pairs = [Pair(y, z, IN_F32) for y, z in zip(found, expected, strict=True)]
    return [*pairs, *(pair for y in found for pair in attached_rows(y))]


def on_state(ops: GpuOps, name: str, *args: Any) -> list[Pair]:
    """Check an operation that updates a state in place."""
    at = STATE_AT[name]
    mine, theirs = list(args), list(args)
    states: PlacedStates = args[at]
    held, expected = _copied(states.held), _copied(states.held)
    mine[at], theirs[at] = states._replace(held=held), states._replace(held=expected)
    ops.begin(states.batch, torch.arange(states.batch.n_rows, device=held.device))
    y, z = getattr(ops, name)(*mine), getattr(REFERENCE, name)(*theirs)
    return [Pair(y, z, OF_STATES), Pair(held, expected, OF_STATES)]


def new_attention(
    ops: GpuOps, q: Tensor, k: Tensor, v: Tensor | None, cache: LayerCache, _batch: Batch,
    scores: Scores, sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> list[Pair]:  # fmt: skip
    """Check `Ops.new_attention`: what it writes to the cache, and what it reads there."""
    n_past = _n_past(cache, len(q), scores)
    _fill(cache, n_past, q.shape[2])
    batch, stop = Batch.of_one(n_past, len(q), 0), n_past + len(q)
    ops.begin(batch, torch.arange(n_past, stop, device=q.device))
    try:
        y = ops.new_attention(q, k, v, cache, batch, scores, sinks, slopes)
        written = _written(k, v, cache, batch)
        z = REFERENCE.attention(q, cache, batch, scores, sinks, slopes)
    finally:
        _clear(cache, stop)
    return [Pair(y, z, OF_SEVERAL), *written]


def write_cache(
    ops: GpuOps, cache: LayerCache, k: Tensor, v: Tensor | None, _batch: Batch
) -> list[Pair]:
    """Check `Ops.write_cache`."""
    batch = Batch.of_one(0, len(k), 0)
    ops.begin(batch, torch.arange(len(k), device=k.device))
    try:
        ops.write_cache(cache, k, v, batch)
        return _written(k, v, cache, batch)
    finally:
        _clear(cache, len(k))


def _written(k: Tensor, v: Tensor | None, cache: LayerCache, batch: Batch) -> list[Pair]:
    """Pair what the cache holds of a batch's tokens with their keys and values."""
    pairs, (piece,) = list[Pair](), batch.pieces
    cells = cache.read(piece, piece.n_past, piece.stop)
    for new, held, kind in zip((k, v), cells, cache.types, strict=True):
        if new is not None:
            heads = new.transpose(0, 1)
            heads = heads if cache.head_map is None else heads[cache.head_map]
            pairs.append(Pair(held.clone(), heads, KV_BARS[kind]))
    return pairs


def attention(
    ops: GpuOps, q: Tensor, cache: LayerCache, _batch: Batch, scores: Scores,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> list[Pair]:  # fmt: skip
    """Check `Ops.attention`."""
    n_past = _n_past(cache, len(q), scores)
    batch, stop = Batch.of_one(n_past, len(q), 0), n_past + len(q)
    _fill(cache, stop, q.shape[2])
    ops.begin(batch, torch.arange(n_past, stop, device=q.device))
    try:
        y = ops.attention(q, cache, batch, scores, sinks, slopes)
        z = REFERENCE.attention(q, cache, batch, scores, sinks, slopes)
    finally:
        _clear(cache, stop)
    return [Pair(y, z, OF_SEVERAL)]


def _n_past(cache: LayerCache, n: int, scores: Scores) -> int:
    """Return how many tokens to cache before n: more than a window or chunk, if there is room."""
    wanted = max(LEAST_PAST, (scores.window or scores.chunk) + n)
    return max(0, min(cache.k.shape[1] - n, wanted))


def _fill(cache: LayerCache, n: int, head_dim: int) -> None:
    """Write random keys and values to the first n positions, by torch."""
    generator = torch.Generator(cache.k.device).manual_seed(n)
    k, v = (
        torch.randn(n, len(cache.k), width, generator=generator, device=cache.k.device)
        for width in (head_dim, cache.head_dim_v)
    )
    cache.write(k, None if cache.is_shared else v, Batch.of_one(0, n, 0))


def _clear(cache: LayerCache, n: int) -> None:
    """Set the first n positions to zero again."""
    for held in cache.held():
        held[:, :n].zero_()


def assign(ops: GpuOps, routing: Routing, logits: Tensor, bias: Tensor | None) -> list[Pair]:
    """Check `Ops.assign`: experts, their weights, and the order of the rows."""
    weights, groups = ops.assign(routing, logits, bias)
    by_number = torch.arange(groups.n_row, device=logits.device)
    expected_weights, expected = REFERENCE.assign(routing, logits, bias)
    chosen = expected.expert_of[expected.row_of]
    pairs = [
        Pair(weights, expected_weights, IN_F32),
        Pair(groups.expert_of[groups.row_of.clamp(0, groups.n_row - 1)], chosen, EXACT),
        Pair(groups.pair_of[groups.row_of.flatten().clamp(0, groups.n_row - 1)], by_number, EXACT),
    ]
    if isinstance(groups, DeviceGroups) and not groups.are_pairs:
        pairs += [Pair(_experts_in_table(groups), expected.expert_of, EXACT)]
    return pairs


def _experts_in_table(groups: DeviceGroups) -> Tensor:
    """Return the expert of each row as the table of blocks has it; -1 where it has none."""
    found = [-1] * groups.n_row
    for expert, first, n in groups.table.tolist():
        for row in range(max(first, 0), min(first + min(n, groups.block_rows), groups.n_row)):
            found[row] = expert
    return torch.tensor(found, device=groups.table.device)


def sum_of_experts(ops: GpuOps, y: Tensor, weights: Tensor | None, groups: Groups) -> list[Pair]:
    """Check `Ops.sum_of_experts`."""
    found = ops.sum_of_experts(y, weights, groups)
    return [Pair(found, REFERENCE.sum_of_experts(y, weights, groups), IN_F32)]


def _listed(found: Any) -> list[Tensor]:
    return [x for x in (found if isinstance(found, tuple | list) else [found]) if x is not None]


def _copied(state: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    copy = torch.empty_strided(
        state.shape, state.stride(), dtype=state.dtype, device=state.device
    )  # fmt: skip
    return copy.copy_(state)
