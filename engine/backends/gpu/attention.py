"""Attention over the cache; kernels first write new keys and values to it.

Kernels read positions and pages from device memory. For few tokens, the keys are therefore split
into pieces that do not depend on them (as in flash-decoding): a fixed number of programs attends to
the visible pieces, and a second kernel combines the partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import has_dense_rows, power_of_two
from engine.backends.gpu.kernels import flash_attention as kernels
from engine.backends.gpu.kernels import kv_cells
from engine.backends.gpu.launch.configs import KernelTarget, allows, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.model.forward.batch import SMALL_BATCH

if TYPE_CHECKING:
    from engine.backends.gpu.page_tables import PagedRows, PagedRun
    from engine.load_params import KVTypes
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import Scores

BLOCKS = {"q8_0": 34, "q4_0": 18}
"""Bytes per block of 32 elements, by block-quantised type of keys or values."""

DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type in which keys or values are stored, by their type."""

WRITTEN = 1 << 10  # elements that each program writes to the cache
MAX_HEAD = 1 << 12  # max. elements per head that one program can write


def write(cache: LayerCache, k: Tensor, v: Tensor | None, rows: PagedRows) -> bool:
    """Store k and v in the cache at the rows' positions; see `LayerCache.write`.

    Positions outside the cache are skipped; the host cannot check, as it does not know them.

    Args:
        k, v: (T, heads, head_dim), F32; only the elements of a head need to be contiguous.

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
    """Return how many heads, or blocks, each program writes, and the number of programs."""
    per_row, rows = (dim // 32, WRITTEN // 32) if kind in BLOCKS else (1, max(1, WRITTEN // size))
    return rows, -(-n_rows * per_row // rows)


def fits(cache: LayerCache, k: Tensor, v: Tensor | None) -> bool:
    """Return whether the kernels can write k and v to the cache."""
    for x, held, kind in zip((k, v), (cache.k, cache.v), cache.types, strict=True):
        if x is None:
            continue
        if not has_dense_rows(x) or not holds(held, kind, cache) or x.shape[1] != held.shape[0]:
            return False
        if x.shape[2] != n_elements(held.shape[2], kind) or x.shape[2] > MAX_HEAD:
            return False
    return v is None or k.shape[0] == v.shape[0]


def placed(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor (T, heads, elements) and its first two strides."""
    token, head, _ = x.stride()
    return x, token, head


def holds(held: Tensor, kind: str, cache: LayerCache) -> bool:
    """Return whether keys or values of a type are on the device in the kernels' layout."""
    head, token, step = held.stride()
    return (
        not cache.is_on_host
        and held.dtype == DTYPES[kind]
        and step == 1
        and head == held.shape[1] * token
        and (kind not in BLOCKS or token % BLOCKS[kind] == 0)
    )


def n_elements(width: int, kind: str) -> int:
    """Return the number of elements in a cache row of `width` bytes (block types) or elements."""
    return width // BLOCKS[kind] * 32 if kind in BLOCKS else width


PIECES = 32  # partial results that the second kernel combines per iteration
NO_SLOT = 0  # partial results to store if all keys are one piece
FEW_KEYS = 64  # keys in a short piece, for few tokens
FEW_PIECES = 64  # short pieces before longer ones, for few tokens
MANY_KEYS = 512  # keys in a short piece, for more than `SMALL_BATCH` tokens
MAX_PIECES = 16  # max. short and max. longer pieces, for more than `SMALL_BATCH` tokens
PROGRAMS = 4  # programs per multiprocessor: as many as fit, to hide memory latency
MIN_PART, MAX_PART = 16, 128  # elements of a head per product


@dataclass(frozen=True, slots=True)
class KeyPieces:
    """How keys are split: `n_small` pieces of `small` keys each, then pieces of `large` keys."""

    small: int
    n_small: int
    large: int

    def n_pieces(self, n_keys: int) -> int:
        """Return the number of pieces for n_keys keys."""
        rest = n_keys - self.small * self.n_small
        return -(-n_keys // self.small) if rest <= 0 else self.n_small - (-rest // self.large)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Tile sizes of the attention kernel.

    Attributes:
        rows: query rows per program.
        keys: keys per step.
        part: query elements that are loaded again for each tile of keys; 0 if registers hold the
            whole queries.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    part: int = 0


New = tuple[Tensor, Tensor | None]
"""New keys and values; see `write`."""


class AttentionShape(NamedTuple):
    """One rank's sizes in a layer's attention.

    Attributes:
        n_kv: number of KV heads, or of query heads if a map gives each one's KV head.
        dim_k, dim_v: elements per key and per value.
        n_ctx: maximum number of positions in a sequence.
        span: maximum number of positions that a token can attend to.
    """

    n_head: int
    n_kv: int
    dim_k: int
    dim_v: int
    n_ctx: int
    span: int
    types: KVTypes

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.n_head // self.n_kv


class AttentionLaunch(NamedTuple):
    """Launch shape for attention with a given number of tokens.

    Attributes:
        n_slot: partial results per row to combine; 0 if its keys are one piece.
        n_split: number of programs that share the pieces for the same rows.
    """

    tiles: TileSizes
    pieces: KeyPieces
    n_slot: int
    n_split: int


def attention(
    q: Tensor, cache: LayerCache, rows: PagedRows, scores: Scores, sinks: Tensor | None = None,
    slopes: Tensor | None = None, new: New | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute `Ops.attention`.

    Args:
        q: (T, n_head, head_dim), F32; only the elements of a head need to be contiguous.
        new: these tokens' keys and values, if they are not in the cache yet.

    Returns:
        None if no kernel supports the arguments; in that case, nothing was written.
    """
    if scores.first >= FEW_KEYS:  # `combine` needs a visible key in each piece
        return None
    vectors = [x for x in (sinks, slopes) if x is not None]
    if any(x.shape != (q.shape[1],) or not has_dense_rows(x) for x in vectors):
        return None
    runs = rows.runs()
    if not all(_serves(q, cache, run) for run in runs):
        return None
    if new is not None and any(run.n_tokens > SMALL_BATCH for run in runs):
        if not write(cache, *new, rows):
            return None
        new = None
    if new is not None and not (fits(cache, *new) and new[0].shape[0] == len(q)):
        return None
    out = torch.empty(*q.shape[:2], cache.head_dim_v, device=q.device)
    for run in runs:
        _attend(q, cache, rows, run, scores, sinks, slopes, new, out)
    return out


def _attend(
    q: Tensor, cache: LayerCache, rows: PagedRows, run: PagedRun, scores: Scores,
    sinks: Tensor | None, slopes: Tensor | None, new: New | None, out: Tensor,
) -> None:  # fmt: skip
    shape, target = shape_of(q, cache, rows, scores), target_of(q.device)
    tiles, pieces, n_slot, n_split = launch_of(shape, run.n_tokens, target, run.n_sequence)
    (type_k, type_v), (new_k, new_v) = cache.types, new or (None, None)
    n_head, dim_k = q.shape[1:]
    tops, sums = out, out
    if n_slot:
        tops = torch.empty(2, run.n_rows, n_head, n_slot, device=q.device)
        sums = torch.empty(run.n_rows, n_head, n_slot, shape.dim_v, device=q.device)
    spans = scores.window, scores.chunk, pieces.small, pieces.n_small, pieces.large, n_slot
    n_blocks = -(-run.n_tokens * shape.group // tiles.rows)
    launch(
        kernels.attend, (shape.n_kv, n_split, run.n_sequence * n_blocks),
        *placed(q), *placed(q if new_k is None else new_k),
        *placed(q if new_v is None else new_v), cache.k, cache.v, rows.positions, rows.tables,
        rows.tables if cache.head_map is None else cache.head_map, q if slopes is None else slopes,
        q if sinks is None else sinks, out, tops, sums, rows.tables.shape[1], run.row,
        run.sequence, run.n_tokens, n_head, shape.group, cache.k.shape[1], scores.scale,
        scores.softcap, scores.first, *spans, n_split,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, TYPE_K=type_k, TYPE_V=type_v,
        OPERAND_K=operand(type_k, target), OPERAND_V=operand(type_v, target),
        PRECISION=target.dot_precision, IN_F32=target.is_interpreted, DIM_K=dim_k,
        DIM_V=shape.dim_v, WIDTH_V=n_elements(cache.v.stride(1), type_v),
        SIZE_K=_part(dim_k, type_k, tiles.part), SIZE_V=_part(shape.dim_v, type_v),
        ROWS=tiles.rows, KEYS=tiles.keys, HOLDS_Q=not tiles.part,
        IS_MAPPED=cache.head_map is not None, HAS_SOFTCAP=bool(scores.softcap),
        HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None,
        TOKENS=0 if new is None else SMALL_BATCH, HAS_NEW_V=new_v is not None,
        NEW=power_of_two(max(dim_k, shape.dim_v)),
    )  # fmt: skip
    if n_slot:
        _combine(rows, run, sinks, tops, sums, out, spans)


def _combine(
    rows: PagedRows, run: PagedRun, sinks: Tensor | None, tops: Tensor, sums: Tensor, out: Tensor,
    spans: tuple[int, ...],
) -> None:  # fmt: skip
    _, n_head, dim_v = out.shape
    size = min(64, power_of_two(dim_v))
    launch(
        kernels.combine, (run.n_rows * n_head, -(-dim_v // size)),
        rows.positions, out if sinks is None else sinks, tops, sums, out, run.row, n_head,
        run.n_rows * n_head, *spans,
        DIM=dim_v, SIZE=size, PIECES=PIECES, HAS_SINKS=sinks is not None,
    )  # fmt: skip


def work_bytes(
    shape: AttentionShape, n_tokens: int, target: KernelTarget, n_sequence: int = 1
) -> int:
    """Return the maximum number of scratch bytes that attention takes.

    Args:
        n_tokens: maximum number of one sequence's tokens in a pass.
        n_sequence: maximum number of sequences with one token each in a pass.
    """
    n_slot = launch_of(shape, 1, target, n_sequence).n_slot
    most = 4 * n_sequence * shape.n_head * n_slot * (shape.dim_v + 2)
    for n in {min(n_tokens, SMALL_BATCH), *range(SMALL_BATCH + 1, n_tokens + 1)}:
        n_slot = launch_of(shape, n, target).n_slot
        if not n_slot and n > SMALL_BATCH:
            break  # larger n need no scratch either
        most = max(most, 4 * n * shape.n_head * n_slot * (shape.dim_v + 2))
    return most


def launch_of(
    shape: AttentionShape, n_tokens: int, target: KernelTarget, n_sequence: int = 1
) -> AttentionLaunch:
    """Return how attention is launched for n_sequence sequences with n_tokens tokens each."""
    is_few = n_tokens <= SMALL_BATCH
    tiles = tiles_of(shape, target, is_few=is_few)
    n_blocks = -(-n_tokens * shape.group // tiles.rows) * shape.n_kv * n_sequence
    if not is_few and n_blocks >= target.n_sm:
        whole = -(-shape.n_ctx // tiles.keys) * tiles.keys
        return AttentionLaunch(tiles, KeyPieces(whole, 1, whole), NO_SLOT, 1)
    pieces = key_pieces_of(shape, is_few=is_few)
    n_slot = pieces.n_pieces(shape.n_ctx)
    if shape.span < shape.n_ctx:
        n_slot = min(n_slot, (shape.span + n_tokens - 2) // pieces.small + 2)
    n_programs = PROGRAMS * target.n_sm
    return AttentionLaunch(tiles, pieces, n_slot, max(1, min(n_slot, -(-n_programs // n_blocks))))


def key_pieces_of(shape: AttentionShape, *, is_few: bool) -> KeyPieces:
    """Return how keys are split: short pieces first, so that many programs share a short context.

    Later pieces are longer, so that partial results stay small relative to the keys. With a sliding
    window, all are short.
    """
    if not is_few:
        large = max(MANY_KEYS, -(-shape.n_ctx // (MANY_KEYS * MAX_PIECES)) * MANY_KEYS)
        return KeyPieces(MANY_KEYS, MAX_PIECES, MANY_KEYS if shape.span < shape.n_ctx else large)
    return KeyPieces(FEW_KEYS, FEW_PIECES, FEW_KEYS if shape.span < shape.n_ctx else 4 * FEW_KEYS)


def tiles_of(shape: AttentionShape, target: KernelTarget, *, is_few: bool) -> TileSizes:
    """Return the tile sizes for up to `SMALL_BATCH` tokens (`is_few`) or for more.

    They are the largest that leave registers free, as reported by the compilers for sm_75, sm_86,
    sm_90 and gfx1100. Operands that are not split into two short numbers, and latent attention,
    load queries again for each tile.
    """
    size, has_blocks = max(shape.dim_k, shape.dim_v), not BLOCKS.keys().isdisjoint(shape.types)
    is_f32 = "f32" in (operand(kind, target) for kind in shape.types)
    if target.maker == "amd" and not is_f32 and not has_blocks and size <= 256:
        return TileSizes(16, 64, 4, 1, 32) if is_few else TileSizes(64, 32, 8, 1, 32)
    if target.maker == "amd":
        return TileSizes(32, 32, 8, 1, 32)
    if is_f32 and (size > 128 or not has_matrices(target)):
        return TileSizes(16, 32, 4, 1, 32) if is_few else TileSizes(32, 32, 8, 1, 32)
    if size > 256:
        return TileSizes(16 if shape.group <= 16 else 32, 32, 8, 3, 64)
    keys = 32 if size > 128 or is_f32 else 64
    if is_few:
        return TileSizes(16, keys, 4, 2)
    if size > 128 or is_f32:
        return TileSizes(32, keys, 8, 2)
    if size > 64:
        return TileSizes(64, 32 if has_blocks else 64, 8, 2)
    return TileSizes(64, 64, 4, 2)


def operand(kind: str, target: KernelTarget) -> str:
    """Return the operand type of `tl.dot` for keys or values: as short as the GPU supports."""
    if kind == "f32" or not has_matrices(target):
        return "f32"
    return "bf16" if kind == "bf16" else "f16"


def has_matrices(target: KernelTarget) -> bool:
    """Return whether Triton multiplies F16 and BF16 matrices on tensor cores."""
    return target.maker != "nvidia" or target.capability >= 80


def shape_of(q: Tensor, cache: LayerCache, rows: PagedRows, scores: Scores) -> AttentionShape:
    """Return the sizes of attention for q (T, n_head, head_dim) over a cache."""
    n_head, n_ctx = q.shape[1], rows.n_ctx
    span = min(n_ctx, scores.window or n_ctx, scores.chunk or n_ctx)
    n_kv = cache.k.shape[0] if cache.head_map is None else n_head
    return AttentionShape(n_head, n_kv, q.shape[2], cache.head_dim_v, n_ctx, span, cache.types)


def _serves(q: Tensor, cache: LayerCache, run: PagedRun) -> bool:
    is_few = run.n_tokens <= SMALL_BATCH
    n_head, n_row = q.shape[1], cache.n_row
    fits_heads = n_head % n_row == 0 if cache.head_map is None else n_head == n_row
    return (
        fits_heads
        and allows(q.device, "attention", str(cache.types), q.shape[2], int(is_few))
        and has_dense_rows(q)
        and holds(cache.k, cache.types.k, cache)
        and holds(cache.v, cache.types.v, cache)
        and n_elements(cache.k.shape[2], cache.types.k) == q.shape[2]
    )


def _part(dim: int, kind: str, most: int = 0) -> int:
    """Return how many of a head's `dim` elements each product covers: 32 for types with blocks.

    Otherwise, the largest power of two that divides `dim`, from `MIN_PART` to `most` or `MAX_PART`.
    """
    most = most or MAX_PART
    return 32 if kind in BLOCKS else max(MIN_PART, min(most, dim & -dim))
