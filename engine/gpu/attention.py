"""Attention kernels: write keys and values to the cache, and attend over it.

The number of cached tokens is read from the device's memory only. So for few tokens the keys are
split into pieces that do not depend on it (as in flash-decoding): a fixed number of programs
attends to the visible pieces, and a second kernel combines the partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.forward.batch_sizes import SMALL_BATCH
from engine.gpu.elementwise import power_of_two
from engine.gpu.kernels import attention as kernels
from engine.gpu.kernels import kv_cells
from engine.gpu.launch.kernel_launch import launch
from engine.gpu.launch.refusals import allows
from engine.gpu.launch.target import KernelTarget, target_of

if TYPE_CHECKING:
    from engine.forward.cache import LayerCache
    from engine.forward.operands import Scores

BLOCKS = {"q8_0": 34, "q4_0": 18}
"""Bytes of a block of 32 elements, by block-quantised KV type."""

DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type of the cache's memory, by KV type."""

WRITTEN = 1 << 10
"""Elements that one program writes to the cache."""

LARGEST_HEAD = 1 << 12
"""Most elements of a head that one program can write."""

PIECES = 32
"""Partial results that the second kernel combines at once."""

NO_SLOT = 0
"""Number of kept partial results where all keys are one piece."""

FEW_KEYS = 64
"""Keys in a short piece, for few tokens."""

FEW_PIECES = 64
"""Number of short pieces before longer ones follow, for few tokens."""

MANY_KEYS = 512
"""Keys in a short piece, for more than `SMALL_BATCH` tokens."""

MOST_PIECES = 16
"""Number of short pieces, and at most of longer ones, for more than `SMALL_BATCH` tokens."""

PROGRAMS = 4
"""Programs per multiprocessor: as many as it holds at once, which hides the memory's latency."""

SMALLEST_PART, LARGEST_PART = 16, 128
"""Smallest and largest number of elements of a head that are multiplied at once."""


@dataclass(frozen=True, slots=True)
class KeyPieces:
    """Split of the keys into pieces: `n_small` of `small` keys, then pieces of `large` keys."""

    small: int
    n_small: int
    large: int

    def n_pieces(self, n_keys: int) -> int:
        """Return the number of pieces that n_keys keys make."""
        rest = n_keys - self.small * self.n_small
        return -(-n_keys // self.small) if rest <= 0 else self.n_small - (-rest // self.large)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Tile sizes of the attention kernel.

    Attributes:
        rows: query rows of one program.
        keys: keys that a program multiplies them with at once.
        num_warps, num_stages: launch options of Triton.
        part: elements of queries that are read again for each tile of keys; 0 if registers hold
            the whole queries.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    part: int = 0


New = tuple[Tensor, Tensor | None]
"""New keys and values, see `write`."""


class AttentionShape(NamedTuple):
    """Sizes of a layer's attention on one rank.

    Attributes:
        n_head: number of query heads.
        n_kv: number of KV heads, or of query heads where a map says which KV head each has.
        dim_k, dim_v: elements of a key and of a value.
        n_ctx: positions of the cache.
        span: most positions that a token can see.
        kv_type: KV type of the cache.
    """

    n_head: int
    n_kv: int
    dim_k: int
    dim_v: int
    n_ctx: int
    span: int
    kv_type: str

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.n_head // self.n_kv


class AttentionLaunch(NamedTuple):
    """Launch shape of attention for a number of tokens.

    Attributes:
        n_slot: partial results of a row that wait to be combined; 0 if its keys are one piece.
        n_split: number of programs that share the pieces of the same rows.
    """

    tiles: TileSizes
    pieces: KeyPieces
    n_slot: int
    n_split: int


def attention(
    q: Tensor,
    cache: LayerCache,
    n_past: Tensor,
    scores: Scores,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    new: New | None = None,
) -> Tensor | None:
    """Compute `Ops.attention`.

    Args:
        q: (T, n_head, head_dim), F32; only the elements of a head need to lie side by side.
        n_past: number of cached tokens, one integer on the device.
        new: keys and values of these tokens, if they are not in the cache yet: see `write`.

    Returns:
        None where no kernel supports the arguments; nothing was written then.
    """
    n_tokens, n_head, dim_k = q.shape
    vectors = [x for x in (sinks, slopes) if x is not None]
    if not _serves(q, cache) or any(x.shape != (n_head,) or not _is_plain(x) for x in vectors):
        return None
    if new is not None and n_tokens > SMALL_BATCH:
        if not write(cache, *new, n_past):
            return None
        new = None
    if new is not None and not (_fits(cache, *new) and new[0].shape[0] == n_tokens):
        return None
    shape, target = shape_of(q, cache, scores), target_of(q.device)
    tiles, pieces, n_slot, n_split = launch_of(shape, n_tokens, target)
    new_k, new_v = new or (None, None)
    out = torch.empty(n_tokens, n_head, shape.dim_v, device=q.device)
    tops, sums = out, out
    if n_slot:
        tops = torch.empty(2, n_tokens, n_head, n_slot, device=q.device)
        sums = torch.empty(n_tokens, n_head, n_slot, shape.dim_v, device=q.device)
    spans = scores.window, scores.chunk, pieces.small, pieces.n_small, pieces.large, n_slot
    launch(
        kernels.attend, (shape.n_kv, n_split, -(-n_tokens * shape.group // tiles.rows)),
        *_placed(q), *_placed(q if new_k is None else new_k),
        *_placed(q if new_v is None else new_v), cache.k, cache.v, n_past,
        n_past if cache.head_map is None else cache.head_map, q if slopes is None else slopes,
        q if sinks is None else sinks, out, tops, sums, n_tokens, n_head, shape.group, shape.n_ctx,
        scores.scale, scores.softcap, *spans, n_split,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, TYPE=cache.kv_type,
        OPERAND=operand(cache.kv_type, target), PRECISION=target.dot_precision,
        IN_F32=target.maker == "interpreter", DIM_K=dim_k, DIM_V=shape.dim_v,
        WIDTH_V=_n_elements(cache.v.stride(1), cache.kv_type),
        SIZE_K=_part(dim_k, cache.kv_type, tiles.part), SIZE_V=_part(shape.dim_v, cache.kv_type),
        ROWS=tiles.rows, KEYS=tiles.keys,
        HOLDS_Q=not tiles.part, IS_MAPPED=cache.head_map is not None,
        HAS_SOFTCAP=bool(scores.softcap), HAS_SLOPES=slopes is not None,
        HAS_SINKS=sinks is not None, TOKENS=0 if new is None else SMALL_BATCH,
        HAS_NEW_V=new_v is not None, NEW=power_of_two(max(dim_k, shape.dim_v)),
    )  # fmt: skip
    if n_slot:
        _combine(q, n_past, sinks, tops, sums, out, spans)
    return out


def _combine(
    q: Tensor, n_past: Tensor, sinks: Tensor | None, tops: Tensor, sums: Tensor, out: Tensor,
    spans: tuple[int, ...],
) -> None:  # fmt: skip
    """Combine the partial results of the pieces into `out` (T, n_head, dim_v)."""
    n_tokens, n_head, dim_v = out.shape
    size = min(64, power_of_two(dim_v))
    launch(
        kernels.combine, (n_tokens * n_head, -(-dim_v // size)),
        n_past, q if sinks is None else sinks, tops, sums, out, n_head, n_tokens * n_head,
        *spans, DIM=dim_v, SIZE=size, PIECES=PIECES, HAS_SINKS=sinks is not None,
    )  # fmt: skip


def work_bytes(shape: AttentionShape, n_tokens: int, target: KernelTarget) -> int:
    """Return the most scratch bytes that attention of up to n_tokens tokens takes."""
    most = 0
    for n in {min(n_tokens, SMALL_BATCH), *range(SMALL_BATCH + 1, n_tokens + 1)}:
        n_slot = launch_of(shape, n, target).n_slot
        if not n_slot and n > SMALL_BATCH:
            break  # and none for more
        most = max(most, 4 * n * shape.n_head * n_slot * (shape.dim_v + 2))
    return most


def launch_of(shape: AttentionShape, n_tokens: int, target: KernelTarget) -> AttentionLaunch:
    """Return how attention of n_tokens tokens is launched."""
    is_few = n_tokens <= SMALL_BATCH
    tiles = tiles_of(shape, target, is_few=is_few)
    n_blocks = -(-n_tokens * shape.group // tiles.rows) * shape.n_kv
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
    """Return the pieces of keys: short ones first, so that many programs share a short context.

    Later ones are longer, so that partial results stay small beside the keys. Where a token sees
    only the last positions, all are short.
    """
    if not is_few:
        large = max(MANY_KEYS, -(-shape.n_ctx // (MANY_KEYS * MOST_PIECES)) * MANY_KEYS)
        return KeyPieces(MANY_KEYS, MOST_PIECES, MANY_KEYS if shape.span < shape.n_ctx else large)
    return KeyPieces(FEW_KEYS, FEW_PIECES, FEW_KEYS if shape.span < shape.n_ctx else 4 * FEW_KEYS)


def tiles_of(shape: AttentionShape, target: KernelTarget, *, is_few: bool) -> TileSizes:
    """Return the tile sizes for up to `SMALL_BATCH` tokens or for more.

    The largest that leave registers free, as the compilers for sm_75, sm_86, sm_90 and gfx1100
    report. Operands that are not split into two short numbers, and latent attention, read queries
    again for each tile.
    """
    size, kind = max(shape.dim_k, shape.dim_v), operand(shape.kv_type, target)
    if target.maker == "amd" and kind != "f32" and shape.kv_type not in BLOCKS and size <= 256:
        return TileSizes(16, 64, 4, 1, 32) if is_few else TileSizes(64, 32, 8, 1, 32)
    if target.maker == "amd":
        return TileSizes(32, 32, 8, 1, 32)
    if kind == "f32" and (size > 128 or not has_matrices(target)):
        return TileSizes(16, 32, 4, 1, 32) if is_few else TileSizes(32, 32, 8, 1, 32)
    if size > 256:
        return TileSizes(16 if shape.group <= 16 else 32, 32, 8, 3, 64)
    keys = 32 if size > 128 or kind == "f32" else 64
    if is_few:
        return TileSizes(16, keys, 4, 2)
    if size > 128 or kind == "f32":
        return TileSizes(32, keys, 8, 2)
    if size > 64:
        return TileSizes(64, 32 if shape.kv_type in BLOCKS else 64, 8, 2)
    return TileSizes(64, 64, 4, 2)


def operand(kv_type: str, target: KernelTarget) -> str:
    """Return the type of `tl.dot`'s operands: as short as the cache's where the GPU has it."""
    if kv_type == "f32" or not has_matrices(target):
        return "f32"
    return "bf16" if kv_type == "bf16" else "f16"


def has_matrices(target: KernelTarget) -> bool:
    """Return whether Triton multiplies F16 and BF16 matrices by tensor cores on a target."""
    return target.maker != "nvidia" or target.capability >= 80


def write(cache: LayerCache, k: Tensor, v: Tensor | None, n_past: Tensor) -> bool:
    """Store k and v in the cache from position `n_past` on; see `LayerCache.write`.

    Positions outside of the cache are skipped: the host does not know `n_past`, so it cannot check.

    Args:
        k, v: (T, heads, head_dim), F32; only the elements of a head need to lie side by side.
        n_past: number of cached tokens, one integer on the device.

    Returns:
        Whether they were stored; if not, no kernel supports the arguments.
    """
    kv_type = cache.kv_type
    if not _fits(cache, k, v) or not allows(k.device, "kv_write", cache.kv_type):
        return False
    n_tokens, n_head, dim_k = k.shape
    dim_v = dim_k if v is None else v.shape[2]
    size = power_of_two(max(dim_k, dim_v))
    n_rows = n_tokens * n_head
    per_row, rows = 1, max(1, WRITTEN // size)
    if kv_type in BLOCKS:
        per_row, rows = max(dim_k, dim_v) // 32, WRITTEN // 32
    launch(
        kv_cells.store, (-(-n_rows * per_row // rows), 1 if v is None else 2),
        *_placed(k), *_placed(k if v is None else v), cache.k, cache.v, n_past, n_rows, n_head,
        cache.k.shape[1],
        TYPE=kv_type, DIM_K=dim_k, DIM_V=dim_v, WIDTH_V=_n_elements(cache.v.stride(1), kv_type),
        ROWS=rows, SIZE=size,
    )  # fmt: skip
    return True


def _fits(cache: LayerCache, k: Tensor, v: Tensor | None) -> bool:
    """Return whether the kernels can write k and v to the cache."""
    for x, held in ((k, cache.k), (k if v is None else v, cache.k if v is None else cache.v)):
        if not _is_plain(x) or not _holds(held, cache) or x.shape[1] != held.shape[0]:
            return False
        if x.shape[2] != _n_elements(held.shape[2], cache.kv_type) or x.shape[2] > LARGEST_HEAD:
            return False
    return v is None or k.shape[0] == v.shape[0]


def _placed(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor (T, heads, elements) and its first two strides."""
    token, head, _ = x.stride()
    return x, token, head


def shape_of(q: Tensor, cache: LayerCache, scores: Scores) -> AttentionShape:
    """Return the sizes of attention of q (T, n_head, head_dim) over a cache."""
    n_head, n_ctx = q.shape[1], cache.k.shape[1]
    span = min(n_ctx, scores.window or n_ctx, scores.chunk or n_ctx)
    n_kv = cache.k.shape[0] if cache.head_map is None else n_head
    return AttentionShape(n_head, n_kv, q.shape[2], cache.head_dim_v, n_ctx, span, cache.kv_type)


def _serves(q: Tensor, cache: LayerCache) -> bool:
    """Return whether the kernel can read q and the cache, and their sizes agree."""
    n_head, n_row = q.shape[1], cache.n_row
    fits = n_head % n_row == 0 if cache.head_map is None else n_head == n_row
    return (
        fits
        and allows(q.device, "attention", cache.kv_type, q.shape[2], int(len(q) <= SMALL_BATCH))
        and _is_plain(q)
        and _holds(cache.k, cache)
        and _holds(cache.v, cache)
        and _n_elements(cache.k.shape[2], cache.kv_type) == q.shape[2]
    )


def _holds(held: Tensor, cache: LayerCache) -> bool:
    """Return whether `held` are keys or values on the device, laid out as the kernels expect."""
    head, token, step = held.stride()
    return (
        not cache.is_on_host
        and held.dtype == DTYPES[cache.kv_type]
        and step == 1
        and head == held.shape[1] * token
        and (cache.kv_type not in BLOCKS or token % BLOCKS[cache.kv_type] == 0)
    )


def _n_elements(width: int, kv_type: str) -> int:
    """Return the elements in a row of the cache, `width` bytes of blocks or numbers wide."""
    return width // BLOCKS[kv_type] * 32 if kv_type in BLOCKS else width


def _part(dim: int, kv_type: str, most: int = 0) -> int:
    """Return how many of a head's `dim` elements are multiplied at once.

    For types without blocks: the largest power of two that divides `dim`, but at least
    `SMALLEST_PART` and at most `most` (`LARGEST_PART` for 0).
    """
    most = most or LARGEST_PART
    return 32 if kv_type in BLOCKS else max(SMALLEST_PART, min(most, dim & -dim))


def _is_plain(x: Tensor) -> bool:
    """Return whether x is F32, not empty, and its rows have no gaps."""
    return x.dtype == torch.float32 and x.numel() > 0 and x.stride(-1) == 1
