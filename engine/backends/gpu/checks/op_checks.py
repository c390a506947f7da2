"""Checks of operations: kernels against torch.

Products are compared for some rows of their weights, dequantised by torch. Kernels multiply the
whole matrix, as in a pass, so that the compiled variant is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.backends.gpu.checks.comparison import (
    EXACT,
    IN_F32,
    KV_BARS,
    OF_ROUNDED,
    OF_SEVERAL,
    OF_WHOLE,
    Bar,
    Pair,
)
from engine.backends.gpu.matmul import gemv
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.moe import DeviceGroups
from engine.backends.gpu.quantised import attached
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.layout import BLOCK, TILE
from engine.model.forward.batch import Batch
from engine.model.forward.ops import REFERENCE
from engine.model.sharding.placement import Shard, Slices
from engine.planning.footprint import slot_pieces

if TYPE_CHECKING:
    from engine.backends.gpu.ops import GpuOps
    from engine.formats.gguf.reader import GGUFFile
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.expert_rows import Groups
    from engine.model.forward.operands import (
        Activation,
        ExpertLayer,
        LinearLayer,
        PlacedStates,
        Routing,
        Scores,
    )
    from engine.model.forward.ops import Ops
    from engine.model.layers.module import Slot

Part = GpuPlanes | GpuPlain
"""A matrix that kernels read, or one per expert or head."""


class MatrixRows(NamedTuple):
    """Some rows of a matrix: their indices, int64 (n,), and values, F32 (n, columns)."""

    at: Tensor
    values: Tensor


class _Place(NamedTuple):
    """A matrix's place in the file: slices of a tensor, joined along `dim`."""

    slot: Slot
    pieces: Sequence[Slices]
    dim: int


class FileRows:
    """Reader for some rows of a rank's matrices: the first, a middle, and the last tile."""

    def __init__(
        self, file: GGUFFile, slots: Iterable[Slot], rank: int, device: torch.device
    ) -> None:
        self._file, self._device = file, device
        self._places: dict[int, _Place] = {}
        self._known: dict[tuple[int, int | None], MatrixRows] = {}
        for slot in slots:
            held, pieces = getattr(slot.owner, slot.attribute), slot_pieces(slot, rank)
            dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
            if isinstance(held, JoinedColumns):
                for part, piece in zip(held.parts, pieces, strict=True):
                    self._places[id(part)] = _Place(slot, [piece], dim)
            elif isinstance(held, GpuPlanes | GpuPlain):
                self._places[id(held)] = _Place(slot, pieces, dim)

    def some(self, part: Part, matrix: int | None = None) -> MatrixRows:
        """Return some rows of a matrix; `matrix` is its index if each expert or head has one."""
        key = id(part), matrix
        if key not in self._known:
            rows = chosen_rows(part.n_rows)
            self._known[key] = MatrixRows(
                torch.from_numpy(rows).to(self._device), self.read(part, rows, matrix)
            )
        return self._known[key]

    def read(self, part: Part, rows: np.ndarray, matrix: int | None = None) -> Tensor:
        """Return rows of a matrix in F32, (n, columns)."""
        slot, pieces, dim = self._places[id(part)]
        kind, columns = slot.tensor.type, pieces[0][-1]
        wanted = [rows] if matrix is None else [np.array(matrix), rows]
        at = [
            _in_file(local, pieces, axis, is_joined=axis == dim)
            for axis, local in enumerate(wanted)
        ]
        first, last = columns.start // kind.block_size, -(-columns.stop // kind.block_size)
        raw = self._file.raw(slot.tensor)[(*map(int, at[:-1]),)]
        raw = raw[:, first * kind.type_size : last * kind.type_size]
        runs = np.split(at[-1], np.flatnonzero(np.diff(at[-1]) != 1) + 1)
        blocks = np.concatenate([raw[int(run[0]) : int(run[-1]) + 1].read() for run in runs])
        start = columns.start - first * kind.block_size
        values = dequantise(torch.from_numpy(blocks).to(self._device), kind.number)
        return values[:, start : start + columns.stop - columns.start]


def chosen_rows(n_rows: int) -> np.ndarray:
    """Return the rows in the first tile, one in the middle, and the last, which may be ragged."""
    tiles = {0, (n_rows - 1) // TILE // 2, (n_rows - 1) // TILE}
    rows = [np.arange(TILE * tile, min(TILE * (tile + 1), n_rows)) for tile in sorted(tiles)]
    return np.concatenate(rows)


def _in_file(
    local: np.ndarray, pieces: Sequence[Slices], axis: int, *, is_joined: bool
) -> np.ndarray:
    some = pieces if is_joined else pieces[:1]
    places = np.concatenate([np.arange(piece[axis].start, piece[axis].stop) for piece in some])
    found: np.ndarray = places[local]
    return found


AS_BYTES = Bar(0.005, 0.003)  # for activations, relative to the largest of 16: half a step is 1/254
N_MATRICES = 3  # max. experts or heads to compare


class ProductChecks:
    """Checks of products with a rank's weights; `rows` are read from the file."""

    def __init__(self, rows: FileRows, ops: Ops) -> None:
        self._rows, self._ops = rows, ops

    def linears(self, whole: bool, x: Tensor, *layers: LinearLayer) -> list[Pair]:
        """Check `Ops.linears`; for `whole`, see `StandIns.arguments`."""
        found = self._ops.linears(x, *layers)
        return [
            pair
            for y, layer in zip(found, layers, strict=True)
            for pair in self._product(y, x, layer.weight, whole, layer.scale, layer.added_bias)
        ]

    def matmul(self, whole: bool, weight: Part, x: Tensor) -> list[Pair]:
        """Check `Weight.matmul`."""
        return self._product(weight.matmul(x), x, weight, whole)

    def _product(
        self, y: Tensor, x: Tensor, weight: object, whole: bool, scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> list[Pair]:  # fmt: skip
        parts = weight.parts if isinstance(weight, JoinedColumns) else [weight]
        held = [part for part in parts if isinstance(part, GpuPlanes | GpuPlain)]
        if len(held) < len(parts):
            return []  # torch multiplies by it
        some = [self._rows.some(part) for part in held]
        bar = OF_ROUNDED if not whole else IN_F32 if _by_gemv(x, held) else OF_WHOLE
        index, values = some[0].at, torch.cat([part.values for part in some], dim=-1)
        expected, size = x @ values.T, _size(x, values)
        if scale is not None:
            expected, size = expected * scale, size * scale.abs()
        if bias is not None:
            expected = expected + bias[index]
        return [Pair(y[:, index], expected, bar, size)]

    def gated_linears(
        self, whole: bool, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> list[Pair]:
        """Check `Ops.gated_linears`."""
        y, inner = self._ops.gated_linears(act, x, gate, up), []
        for layer in (gate, up):
            if not isinstance(layer.weight, GpuPlanes | GpuPlain):
                return []
            index, values = self._rows.some(layer.weight)
            z = x @ values.T
            z = z if layer.scale is None else z * layer.scale
            inner.append(z if layer.added_bias is None else z + layer.added_bias[index])
        is_exact = _by_gemv(x, [gate.weight], "gated") or _by_gemv(x, [gate.weight])
        bar = OF_SEVERAL if not whole else IN_F32 if is_exact else OF_WHOLE
        return [Pair(y[:, index], REFERENCE.gated(act, *inner), bar), *attached_rows(y)]

    def lookup(self, _whole: bool, weight: Part, ids: Tensor) -> list[Pair]:
        """Check `Weight.lookup`; the ids include one that has no row."""
        index, values = self._rows.some(weight)
        order = (torch.arange(len(ids), device=ids.device) * 7 + len(index) - 1) % len(index)
        chosen, expected = index[order], values[order]
        if len(ids) > 1:
            chosen[1], expected[1] = -1, 0
        return [Pair(weight.lookup(chosen), expected, EXACT)]

    def per_head(
        self, whole: bool, weight: Part, x: Tensor, rows: slice = slice(None), *,
        transposed: bool = False,
    ) -> list[Pair]:  # fmt: skip
        """Check `Weight.per_head` for some heads."""
        y = weight.per_head(x, rows, transposed=transposed)
        wanted, bar = np.arange(weight.n_rows)[rows], OF_WHOLE if whole else OF_ROUNDED
        pairs = []
        for head in _some(x.shape[1]):
            values = self._rows.read(weight, wanted, head)
            values = values.T if transposed else values
            z = x[:, head]
            pairs.append(Pair(y[:, head], z @ values.T, bar, _size(z, values)))
        return pairs

    def experts(
        self, _whole: bool, act: Activation, x: Tensor, gate: ExpertLayer | None,
        up: ExpertLayer | None, down: ExpertLayer, groups: Groups, factors: Tensor | None = None,
    ) -> list[Pair]:  # fmt: skip
        """Check `Ops.experts` for some experts.

        The last matrix's input is computed by the kernels for one matrix, which are checked first.
        """
        y = self._ops.experts(act, x, gate, up, down, groups, factors)
        rows = groups.rows(x, factors).contiguous()
        pairs, inner = [], []
        for layer in (gate, up):
            if layer is not None:
                inner.append(layer(rows, groups))
                pairs += self._experts_product(inner[-1], rows, layer, groups)
        if gate is None:
            z = REFERENCE.activate(act, inner[0])
        else:
            z = REFERENCE.gated(act, *(inner[0].chunk(2, -1) if up is None else inner))
        return pairs + self._experts_product(y, z, down, groups)

    def _experts_product(
        self, y: Tensor, x: Tensor, layer: ExpertLayer, groups: Groups
    ) -> list[Pair]:
        weight, pairs = layer.weight, []
        if not isinstance(weight, GpuPlanes | GpuPlain):
            return []
        used = torch.unique(groups.expert_of).tolist()
        for expert in (used[n] for n in _some(len(used))):
            index, values = self._rows.some(weight, expert)
            mine = (groups.expert_of == expert).nonzero()[:, 0]
            z = x[mine]
            expected, size = z @ values.T, _size(z, values)
            if layer.scale is not None:
                expected, size = expected * layer.scale[expert], size * layer.scale[expert].abs()
            if layer.bias is not None:
                expected = expected + layer.bias[expert, index]
            pairs.append(Pair(y[mine][:, index], expected, OF_SEVERAL, size))
        return pairs


def attached_rows(y: Tensor) -> list[Pair]:
    """Compare a result with the quantised rows, if any, that a kernel attached to it."""
    rows = attached(y)
    if rows is None:
        return []
    n_half = 2 * rows.extent.n_blocks
    if not rows.x_bytes:
        numbers, sums = (some.view(torch.float32) for some in (rows.numbers, rows.facts))
        total = numbers.reshape(rows.n_row, n_half, -1).sum(-1)
        return [
            Pair(numbers.reshape(y.shape), y, EXACT),
            Pair(sums.reshape(total.shape), total, IN_F32),
        ]
    parts = rows.numbers.view(torch.int8).view(rows.n_row, -1, rows.x_bytes, 2, BLOCK // 2).int()
    whole = parts[:, :, 0] if rows.x_bytes == 1 else parts[:, :, 0] * 255 + parts[:, :, 1]
    scales, sums = rows.facts.view(torch.int32).chunk(2, dim=-1)
    numbers = whole * scales.contiguous().view(torch.float32)[..., None]
    halves = y.view(numbers.shape)
    largest = halves.abs().amax(-1, keepdim=True).expand(numbers.shape)
    return [Pair(numbers, halves, AS_BYTES, largest), Pair(sums, whole.sum(-1), EXACT)]


def _by_gemv(x: Tensor, parts: Sequence[object], kernel: str = "gemv") -> bool:
    """Return whether gemv multiplies x by a matrix's parts: in F32, with unrounded weights."""
    held = [part for part in parts if isinstance(part, GpuPlanes)]
    if len(held) < len(parts):
        return False
    columns = torch.split(x, [part.extent.n_columns for part in held], dim=-1)
    some = zip(columns, held, strict=True)
    return all(gemv.serves(part_of_x, [part], kernel) for part_of_x, part in some)


def _size(x: Tensor, rows: Tensor) -> Tensor:
    """Return the size of each product of x (T, n) and rows (R, n), (T, R)."""
    return x.square().mean(-1).sqrt()[:, None] * rows.square().sum(-1).sqrt()


def _some(n: int) -> Sequence[int]:
    """Return up to `N_MATRICES` of n indices: the first, one in the middle, and the last."""
    wanted: dict[Any, None] = dict.fromkeys((0, n // 2, n - 1))
    return list(wanted)[:N_MATRICES]


STATE_AT = {"causal_conv": 1, "delta_net": 1, "selective_scan": 7, "state_space_scan": 1}
"""Index of the argument that is updated in place, by the operation's name."""

OF_STATES = Bar(0.02, 5e-3)  # for recurrent operations, whose errors add up from token to token
MIN_PAST = 300  # cached tokens before the queries, if they fit: several pieces of keys, one partial


def in_f32(ops: GpuOps, name: str, *args: Any, **named: Any) -> list[Pair]:
    """Check an operation that has neither weights in planes nor a state."""
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
    """Check `Ops.new_attention`: its cache writes and its result."""
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
    """Return how many tokens to cache before n: more than a window or chunk, if they fit."""
    wanted = max(MIN_PAST, (scores.window or scores.chunk) + n)
    return max(0, min(cache.k.shape[1] - n, wanted))


def _fill(cache: LayerCache, n: int, head_dim: int) -> None:
    generator = torch.Generator(cache.k.device).manual_seed(n)
    k, v = (
        torch.randn(n, len(cache.k), width, generator=generator, device=cache.k.device)
        for width in (head_dim, cache.head_dim_v)
    )
    cache.write(k, None if cache.is_shared else v, Batch.of_one(0, n, 0))


def _clear(cache: LayerCache, n: int) -> None:
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
    """Return each row's expert according to the table of blocks; -1 if it has none."""
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
    copy = torch.empty_strided(
        state.shape, state.stride(), dtype=state.dtype, device=state.device
    )  # fmt: skip
    return copy.copy_(state)
