"""Bytes of a rank's tensors in the file and in memory, and of its working memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.gguf.tensors import split_name
from engine.formats.quants.layout import (
    BF16_CHUNK,
    BLOCK,
    LAYOUTS,
    TILE,
    Extent,
    n_tiles,
    panel_block_bytes,
    word_tile_bytes,
)
from engine.hardware.devices.types import is_cpu
from engine.model.forward.batch import (
    BF16_BATCH,
    KEPT_STATES,
    MAX_AT_ONCE,
    SMALL_BATCH,
    captured_rows,
    captured_sizes,
    guessing_sizes,
    largest_chunk,
    recorded_rows,
)
from engine.model.forward.state import (
    CPU_STEP,
    DEVICE_STEP,
    F32_BYTES,
    SHARED_ROWS,
    AttentionSize,
    RecurrentState,
    State,
    attention_work,
    pages_bytes,
    pieces_bytes,
)
from engine.model.sharding.placement import Shard, Slices
from engine.planning.memory import (
    LOADING_BYTES,
    aligned_bytes,
    allocated_bytes,
    is_arena,
    padding_bytes,
)

if TYPE_CHECKING:
    from engine.model.layers.hparams import HParams
    from engine.model.layers.module import Slot
    from engine.model.sharding.split import BlockSplit

EXPERTS = ("exps", "shexp")
"""Strings in the names of matrices for routed and shared experts."""

HALF_TYPES = ("F16", "BF16")
"""GGML types of matrices that become int16 panels."""

BF16_BYTES = 2

HELD_ROWS = MAX_AT_ONCE * KEPT_STATES
"""Hidden states stored per MTP block; see `forward.hidden_states`."""

MTP_ROWS = 4
"""Hidden states per token and pass for an MTP block: embeddings, hidden states from the previous
tokens, and both together."""

UNPACK_BYTES = 2 * F32_BYTES * (1 << 22)
"""Scratch memory for dequantising a packed matrix in chunks."""


def slot_pieces(slot: Slot, rank: int) -> tuple[Slices, ...]:
    """Return a rank's parts of a tensor; empty if it has none."""
    return slot.placement.pieces(slot.tensor.shape, rank)


def n_elements(slices: Slices) -> int:
    """Return the number of elements in a part of a tensor."""
    return prod([part.stop - part.start for part in slices])


def packed_bytes(slot: Slot, slices: Slices) -> int:
    """Return the bytes of the file's quantisation blocks that cover a part of a tensor."""
    kind = slot.tensor.type
    columns = slices[-1]
    n_blocks: int = -(-columns.stop // kind.block_size) - columns.start // kind.block_size
    return n_elements(slices[:-1]) * n_blocks * kind.type_size


def held_bytes(slot: Slot, rank: int, storage: str) -> int:
    """Return the bytes that a tensor takes on a rank once loaded."""
    return sum(sizes_of_pieces(slot, slot_pieces(slot, rank), storage))


def sizes_of_pieces(slot: Slot, pieces: Sequence[Slices], storage: str) -> list[int]:
    """Return the size of each torch tensor that these parts are stored in.

    Row intervals share one tensor; column intervals do so only if packed or dequantised.
    """
    kind = slot.holding(storage)
    if kind == "planes":
        layout = LAYOUTS[slot.tensor.type.number]
        return [
            n_matrix * Extent.of(columns.start, columns.stop).n_bytes(layout, n_rows)
            for n_matrix, n_rows, columns in plane_parts(slot, pieces)
        ]
    if kind == "plain":
        size = slot.tensor.type.type_size
        return [size * n * rows * _width(part) for n, rows, part in plane_parts(slot, pieces)]
    if kind == "packed":
        return [sum(packed_bytes(slot, piece) for piece in pieces)]
    return [F32_BYTES * sum(map(n_elements, pieces))]


def word_bytes(slot: Slot, pieces: Sequence[Slices]) -> int:
    """Return the extra bytes that these parts take as int16 panels.

    Processors that multiply F16 and BF16 matrices as int16 (`cpu.kernels.products.int16_panels`)
    store a factor for every 256 columns of a row, and whole tiles of rows.
    """
    if not slot.is_matrix or slot.is_lookup or slot.tensor.type.name not in HALF_TYPES:
        return 0
    size, more = slot.tensor.type.type_size, 0
    for n_matrix, n_rows, columns in plane_parts(slot, pieces):
        extent = Extent.of(columns.start, columns.stop)
        if n_matrix == 1 and n_rows >= TILE and extent.n_columns % BLOCK == 0:
            more += n_tiles(n_rows) * word_tile_bytes(extent.n_columns // BLOCK)
            more -= size * n_rows * extent.n_columns
    return more


def _width(part: slice) -> int:
    return int(part.stop - part.start)


def arena_key(slot: Slot, storage: str) -> object:
    """Return a key shared by a block's matrices in one arena; None for separate tensors."""
    place = split_name(slot.tensor.name)
    is_cut = isinstance(slot.placement, Shard) and slot.holding(storage) in ("planes", "plain")
    if place is None or not is_cut:
        return None
    layer, name = place
    return layer, name.partition("_")[0], next((kind for kind in EXPERTS if kind in name), "")


class TensorPart(NamedTuple):
    """A rank's part of one tensor: its intervals, and the size of each torch tensor."""

    slot: Slot
    pieces: tuple[Slices, ...]
    sizes: list[int]


def tensor_parts(slots: Iterable[Slot], rank: int, storage: str) -> list[TensorPart]:
    """Return a rank's non-empty parts of these tensors."""
    return [
        TensorPart(slot, pieces, sizes_of_pieces(slot, pieces, storage))
        for slot in slots
        if (pieces := slot_pieces(slot, rank))
    ]


def padding_of_parts(parts: Iterable[TensorPart], storage: str) -> int:
    """Return the bytes that parts of tensors take on a GPU in addition to their sizes."""
    found: dict[object, list[int]] = defaultdict(list)
    for part in parts:
        found[arena_key(part.slot, storage)] += part.sizes
    padding = sum(map(padding_bytes, found.pop(None, ())))
    for sizes in found.values():
        total = sum(map(aligned_bytes, sizes))
        if is_arena(total):
            padding += allocated_bytes(total) - sum(sizes)
        else:
            padding += sum(map(padding_bytes, sizes))
    return padding


def plane_parts(slot: Slot, pieces: Sequence[Slices]) -> list[tuple[int, int, slice]]:
    """Return a rank's parts of a matrix, each as (number of matrices, rows per matrix, columns)."""
    shapes = [[part.stop - part.start for part in piece] for piece in pieces]
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    if not pieces or dim == len(shapes[0]) - 1:
        return [
            (prod(shape[:-2]), shape[-2], piece[-1])
            for shape, piece in zip(shapes, pieces, strict=True)
        ]
    whole = list(shapes[0])
    whole[dim] = sum(shape[dim] for shape in shapes)
    return [(prod(whole[:-2]), whole[-2], pieces[0][-1])]


@dataclass(frozen=True, slots=True)
class WorkingSizes:
    """Sizes of the tensors that one rank computes with, each the largest over all blocks.

    Attributes:
        columns: columns of an FFN or of the shared expert.
        routed: columns of each routed expert.
        width: elements in all query heads, or in query heads against latents.
        recurrent: elements per token in a recurrent layer; see `RecurrentState.n_work`.
    """

    columns: int = 0
    routed: int = 0
    width: int = 0
    recurrent: int = 0
    caches: frozenset[AttentionSize] = frozenset()
    rows: int = 0

    @classmethod
    def of_block(cls, block: BlockSplit, rank: int) -> WorkingSizes:
        """Return the sizes of one block's FFN and experts on `rank`."""
        return cls(max(block.ffn.size(rank), block.shared.size(rank)), block.experts.size(rank))

    @classmethod
    def of_states(cls, states: Iterable[State], rank: int) -> WorkingSizes:
        """Return the sizes of layers with these states on `rank`."""
        return cls.largest([_of_state(state, rank) for state in states])

    @classmethod
    def largest(cls, several: Iterable[WorkingSizes]) -> WorkingSizes:
        """Return the maximum of each size."""
        columns = routed = width = recurrent = rows = 0
        caches: frozenset[AttentionSize] = frozenset()
        for one in several:
            columns = max(columns, one.columns)
            routed = max(routed, one.routed)
            width = max(width, one.width)
            recurrent = max(recurrent, one.recurrent)
            rows = max(rows, one.rows)
            if not one.caches <= caches:
                caches |= one.caches
        return cls(columns, routed, width, recurrent, caches, rows)


def _of_state(state: State, rank: int) -> WorkingSizes:
    if isinstance(state, RecurrentState):
        return WorkingSizes(recurrent=state.n_work(rank))
    heads = state.heads.size(rank)
    if not heads:
        return WorkingSizes()
    one = AttentionSize(heads, state.kv_heads.size(rank), state.row, state.v_in_k)
    return WorkingSizes(width=heads * state.head_dim_k, caches=frozenset({one}))


def compute_bytes(
    working: WorkingSizes, hp: HParams, n_tokens: int, n_ctx: int, device: str, storage: str, *,
    is_kv_on_host: bool = False, fast_prompts: bool = False, n_parallel: int = 1,
    n_checked: int = 0,
) -> int:  # fmt: skip
    """Estimate the working memory for the largest forward pass, in bytes.

    On a GPU, it is at least the temporary memory for loading, which is free by then.

    Args:
        n_parallel: maximum number of sequences in a decode pass.
        n_checked: maximum number of rows in a pass that verifies draft tokens; 0 if there is none.
    """
    if working == WorkingSizes():
        return 0
    logits = F32_BYTES * (working.rows + hp.n_vocab)
    guessing = 0
    if hp.n_mtp:
        guessing = F32_BYTES * hp.n_embd * (HELD_ROWS * hp.n_mtp + MTP_ROWS * n_tokens)
    if storage == "kernels" and is_cpu(device):
        n_singles = max(n_parallel, n_checked)
        kernels = _kernel_bytes(working, hp, n_tokens, n_ctx, n_singles, fast_prompts)
        return guessing + n_singles * logits + kernels
    if storage == "kernels":
        sizes = captured_sizes(n_parallel, n_checked)
        graphs = sizes + hp.n_mtp * guessing_sizes(n_parallel)
        n_bytes = _device_bytes(working, hp, n_tokens, n_ctx, graphs, is_kv_on_host=is_kv_on_host)
        n_bytes += logits * sum(sizes[len(captured_sizes(n_parallel, 0)) :])
        # a graph keeps its logits and, in addition, those after penalties, and counts
        samplers = 2 * F32_BYTES * hp.n_vocab * captured_rows(n_parallel) if n_parallel > 1 else 0
        if hp.n_mtp:
            guessing += len(guessing_sizes(n_parallel)) * n_parallel * logits
        return guessing + max(2 * logits + samplers + n_bytes, LOADING_BYTES)
    n_used = max(hp.n_expert_used, default=0) if working.routed else 0
    routed = n_used * (3 * working.routed + 2 * hp.n_embd)
    per_token = 6 * hp.n_embd + 3 * working.columns + routed
    per_token += 4 * working.width + working.recurrent
    step = CPU_STEP if is_cpu(device) else DEVICE_STEP
    attention = max(
        (attention_work(c.heads, c.row, n_tokens, n_ctx, step) for c in working.caches), default=0
    )
    unpack = UNPACK_BYTES if storage == "packed" else 0
    return guessing + F32_BYTES * (n_tokens * per_token + attention) + logits + unpack


def _kernel_bytes(
    working: WorkingSizes, hp: HParams, n_tokens: int, n_ctx: int, n_parallel: int,
    fast_prompts: bool,
) -> int:  # fmt: skip
    """Estimate the working memory of the CPU path, excluding logits, in bytes.

    Attention, FFN and recurrent layers run one after the other, so only the largest counts, plus
    the hidden state, its norms, scratch for products and recorded passes (see `recorded_rows`).
    """
    stream, feed = 6 * hp.n_embd, 3 * working.columns
    panel = panel_block_bytes(x_bytes(hp))
    short = max(BF16_BYTES * fast_prompts, panel / BLOCK)  # bytes per number in products
    sizes = [F32_BYTES * feed + int(short * working.columns), F32_BYTES * working.recurrent]
    if working.routed:
        n_used, widest = max(hp.n_expert_used), max(working.routed, hp.n_embd)
        panels = -(-widest // BLOCK) * panel
        rows = 3 * working.routed + 2 * hp.n_embd
        sizes.append(n_used * (F32_BYTES * rows + panels))
    attention = max((pages_bytes(c, n_ctx) for c in working.caches), default=0)
    attention += F32_BYTES * n_tokens * 4 * working.width
    n_recorded = recorded_rows(n_parallel)
    recorded = n_recorded * F32_BYTES * hp.n_layer * (stream + feed + 4 * working.width)
    scratch = int(n_tokens * hp.n_embd * short)
    if x_bytes(hp) == 1:  # values are multiplied as int16, and stay packed
        scratch += n_tokens * hp.n_embd * (panel_block_bytes(2) + F32_BYTES * BLOCK) // BLOCK
    if fast_prompts and n_tokens >= BF16_BATCH:
        scratch += 2 * BF16_BYTES * BF16_CHUNK  # torch packs another copy
    passing = int(HEAP_WASTE * n_tokens * F32_BYTES * stream)
    passing += max(attention, int(HEAP_WASTE * n_tokens * max(sizes)))
    return passing + scratch + recorded


def _device_bytes(
    working: WorkingSizes, hp: HParams, n_tokens: int, n_ctx: int, captured: Sequence[int], *,
    is_kv_on_host: bool,
) -> int:  # fmt: skip
    heads = max((cache.heads for cache in working.caches), default=0)
    few = min(n_tokens, max(SMALL_BATCH, SHARED_ROWS // max(1, heads)))
    passes = (
        _device_pass(working, hp, n, n_ctx, is_kv_on_host=is_kv_on_host) for n in {few, n_tokens}
    )
    one = _device_pass(working, hp, 1, n_ctx, is_kv_on_host=is_kv_on_host, are_singles=True)
    graphs = sum(captured) * one  # for few rows, memory grows with their number
    return int(HEAP_WASTE * (max(passes) + graphs)) + len(captured) * GRAPH_BYTES + LIBRARY_BYTES


def _device_pass(
    working: WorkingSizes, hp: HParams, n_tokens: int, n_ctx: int, *, is_kv_on_host: bool,
    are_singles: bool = False,
) -> int:  # fmt: skip
    """Return the bytes of a pass's tensors on a GPU: hidden state plus attention, FFN or experts.

    For many tokens, matrices are dequantised to BF16 in chunks of rows. The last tensor that a part
    keeps (among queries, keys and values, or gate and up) is allocated without that scratch.

    Args:
        are_singles: whether each token belongs to a different sequence.
    """

    def scratch(n_rows: int, n_columns: int) -> int:
        found = largest_chunk(n_tokens, n_rows, n_columns) if n_tokens > BF16_BATCH else 0
        return BF16_BYTES * found

    per_token = (4 * F32_BYTES + BF16_BYTES) * hp.n_embd
    feed, recurrent = (F32_BYTES * n_tokens * n for n in (working.columns, working.recurrent))
    wide = max(scratch(working.recurrent, hp.n_embd), scratch(hp.n_embd, working.recurrent))
    sizes = [2 * feed + max(feed, scratch(working.columns, hp.n_embd)), recurrent + wide]
    sizes.append(3 * feed // 2 + scratch(hp.n_embd, working.columns))
    if working.routed:
        inner = (3 * F32_BYTES + BF16_BYTES) * working.routed
        sizes.append(n_tokens * max(hp.n_expert_used) * (inner + F32_BYTES * hp.n_embd))
    work = max(
        (pieces_bytes(cache, n_tokens, n_ctx, are_singles) for cache in working.caches), default=0
    )
    if is_kv_on_host:
        sizes_of_work = (
            attention_work(c.heads, c.row, n_tokens, n_ctx, DEVICE_STEP) for c in working.caches
        )
        work = F32_BYTES * max(sizes_of_work, default=0)
    width = F32_BYTES * n_tokens * working.width
    wide = max(scratch(working.width, hp.n_embd), scratch(hp.n_embd, working.width))
    sizes.append(3 * width + max(width + work, wide))
    return n_tokens * per_token + max(sizes)


GRAPH_BYTES = 32 << 20
"""Memory that torch reserves for a decode graph beyond its tensors, in blocks of 2 and 20 MiB."""

LIBRARY_BYTES = 32 << 20
"""Size of cuBLAS's workspace: 32 MiB on Hopper, 8 on other GPUs."""

HEAP_WASTE = 1.15
"""Ratio of a heap's size to that of its tensors; more than 1 because of fragmentation."""


def x_bytes(hp: HParams) -> int:
    """Return the bytes per quantised activation: two in models with routed experts, otherwise one.

    Rounding to one byte changes a router's scores by about 1 %; two experts often differ by less.
    """
    return 2 if any(hp.n_ff_exp) else 1
