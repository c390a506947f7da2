"""Declarations of layers' KV caches and recurrent states, which the runtime allocates per rank.

A layer keeps its declaration as an attribute and passes it to `Context` to access the memory. The
planner reads the same declarations, so it counts exactly the bytes that are allocated later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gguf.constants import GGMLQuantizationType

from engine.errors import EngineError, Sentence
from engine.formats.gguf.tensors import TYPES, TypeInfo, row_bytes
from engine.hardware.devices.host import usable_cores
from engine.load_params import KV_TYPES, KVTypes, kv_types
from engine.model.forward.batch import MAX_AT_ONCE, PROMPT_BATCH, SMALL_BATCH
from engine.model.forward.pages import NO_WINDOW, PAGE, AttentionWindow, in_order
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import Segments

if TYPE_CHECKING:
    from engine.load_params import LoadParams

MIN_SLOTS = 2  # minimum number of slots for recurrent states on the devices

FEW_GUESSED = 3
"""Maximum number of draft tokens per answer with their own state slots, unless memory allows more.

Each slot takes as much memory as another sequence's state: 79 MB for Qwen 3 Next 80B, 157 MB for
Qwen 3.5 27B. If memory allows, every draft token up to `LoadParams.draft_max` has a slot.
"""

REPORTED_COUNTS = 1, 2, 3, 4, 6, 8, 12, MAX_AT_ONCE
"""Request counts for which `CacheSize.rooms` returns the maximum length."""


class RequestRoom(NamedTuple):
    """Capacity of a cache: `n` parallel requests with up to `n_tokens` tokens each."""

    n: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Sizes that determine the memory for keys, values and recurrent states.

    Attributes:
        n_ctx: maximum number of tokens per sequence.
        kv_type: KV type; see `LoadParams.kv_type`.
        n_parallel: number of sequences of `n_ctx` tokens that fit.
        n_batch: maximum number of prompt tokens per pass.
        n_guessed: maximum number of draft tokens per sequence with their own state slots.
    """

    n_ctx: int
    kv_type: str = "f16"
    n_parallel: int = 1
    n_batch: int = PROMPT_BATCH
    n_guessed: int = 0

    @classmethod
    def asked(
        cls, params: LoadParams, n_ctx: int, n_batch: int | None = None,
        n_guessed: int | None = None,
    ) -> CacheSize:  # fmt: skip
        """Return the sizes for a load with these parameters.

        Args:
            n_ctx: context length that the model allows.
            n_batch: number of prompt tokens per pass; None for `params.n_batch` or the default.
            n_guessed: see `CacheSize`; None for `few_guessed`.
        """
        n_batch = n_batch or params.n_batch or PROMPT_BATCH
        n_guessed = few_guessed(params) if n_guessed is None else n_guessed
        return cls(n_ctx, params.kv_type, params.parallel, n_batch, n_guessed)

    def n_pages(self, window: AttentionWindow) -> int:
        """Return the number of pages for a group of layers.

        Full-attention layers have pages for `n_parallel` full-length sequences, or for a larger
        number of shorter ones. Layers with a window keep `n_windows` windows plus the batch being
        computed, but never need more pages than full-attention layers.
        """
        whole = self.n_parallel * -(-self.n_ctx // PAGE)
        if window.n is None:
            return whole
        computed = window.n_pages(self.n_ctx, min(self.n_batch, self.n_ctx))
        return min(whole, computed + (self.n_windows - 1) * window.n_pages(self.n_ctx, 1))

    @property
    def n_windows(self) -> int:
        """Number of sequences, running or idle, that keep their windows.

        A chat can continue without recomputing its last window if that window was kept. There are
        therefore two windows per parallel sequence (one running, one idle) and one for a short
        request in between: three by default. Windows are much smaller than whole sequences, but not
        negligible in large models.
        """
        return min(MAX_AT_ONCE, 2 * self.n_parallel + 1)

    @property
    def n_slots(self) -> int:
        """Number of recurrent states on the devices.

        Each of `n_parallel` sequences has one, plus one per draft token during verification. Other
        sequences can use free slots.
        """
        n_checked = min(MAX_AT_ONCE, self.n_parallel * (1 + self.n_guessed))
        return max(MIN_SLOTS, self.n_parallel, n_checked)

    def rooms(
        self, windows: Iterable[AttentionWindow], *, has_states: bool
    ) -> tuple[RequestRoom, ...]:
        """Return the maximum request length for several request counts, longest first.

        Each group of layers has one of `windows`; recurrent states (`has_states`) take a slot per
        sequence.
        """
        windows = tuple(windows)
        most = min(MAX_AT_ONCE, self.n_slots) if has_states else MAX_AT_ONCE
        counts = {n for n in REPORTED_COUNTS if n < most} | {min(self.n_parallel, most), most}
        rooms = [RequestRoom(n, self._longest(n, windows)) for n in sorted(counts)]
        shorter = [*(room.n_tokens for room in rooms[1:]), 0]
        return tuple(r for r, next_n in zip(rooms, shorter, strict=True) if r.n_tokens > next_n)

    def _longest(self, n: int, windows: tuple[AttentionWindow, ...]) -> int:
        """Return the maximum length per request for `n` requests; 0 if there are too few pages."""
        if self._have_room(n, self.n_ctx, windows):
            return self.n_ctx
        n_pages = range(-(-self.n_ctx // PAGE))
        full = bisect_left(n_pages, True, key=lambda i: not self._have_room(n, i * PAGE, windows))
        return max(0, full - 1) * PAGE

    def _have_room(self, n: int, n_tokens: int, windows: tuple[AttentionWindow, ...]) -> bool:
        """Return whether `n` requests of `n_tokens` can run while one of them reads its prompt."""
        n_batch = min(self.n_batch, n_tokens)
        return all(
            window.n_pages(n_tokens, n_batch) + (n - 1) * window.n_pages(n_tokens, 1)
            <= self.n_pages(window)
            for window in windows
        )

    def n_held(self, window: AttentionWindow) -> int:
        """Return the number of tokens for which a layer has memory."""
        return self.n_pages(window) * PAGE


def few_guessed(params: LoadParams) -> int:
    """Return the number of draft tokens per sequence that always have state slots."""
    return min(params.n_draft, FEW_GUESSED)


F32_BYTES = 4

KV_INFO: Mapping[str, TypeInfo] = MappingProxyType(
    {name: TYPES[GGMLQuantizationType[name.upper()]] for name in KV_TYPES}
)
"""GGML type for each KV type."""


@dataclass(frozen=True, slots=True)
class Step:
    """F32 elements per step of attention over a cache: for keys and values, and for scores."""

    keys: int
    scores: int


CPU_STEP = Step(keys=1 << 21, scores=1 << 19)
"""Step for torch on a CPU: one head's keys and scores fit in a core's caches."""

ATTENTION_BLOCK = 64  # positions per block of keys and values in the CPU's attention kernels

ATTENTION_HEADS = 64
"""Maximum number of query heads that these kernels compute together for one token."""

ATTENTION_VECTOR_BYTES = 64  # vector size of these kernels; queries and results are padded to it

ATTENTION_TILE_BYTES = 512 << 10
"""Maximum bytes of their queries and results for several tokens, to fit in a core's cache."""

ATTENTION_RESULTS_BYTES = 32 << 20
"""Maximum size of their per-page results, which are merged at the end."""

DEVICE_STEP = Step(keys=1 << 24, scores=1 << 24)
"""Step for other devices, long enough to hide launch latency."""


class KVState:
    """Keys and values of one attention layer, split like the heads that use them.

    Args:
        heads: each rank's query heads.
        kv_heads: each rank's key-value heads.
        window: widest window among the layers that read this cache.
        v_in_k: whether values are the first `head_dim_v` elements of the keys, stored once (MLA).
    """

    def __init__(
        self, heads: Ranges, kv_heads: Ranges, head_dim_k: int, head_dim_v: int,
        window: AttentionWindow = NO_WINDOW, *, v_in_k: bool = False,
    ) -> None:  # fmt: skip
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_v
        self.window = window
        self.v_in_k = v_in_k

    def cuts(self) -> dict[str, Segments]:
        """Return how the first dimension of "k", and of "v" if stored, is split over ranks."""
        return dict.fromkeys("k" if self.v_in_k else "kv", (self.kv_heads,))

    def slice_key(self, rank: int) -> object:
        """Return a key that is equal for ranks with the same heads, even in different splits."""
        return self.heads.spans[rank], self.kv_heads.spans[rank]

    def n_bytes(self, rank: int, size: CacheSize) -> int:
        """Return the size on `rank`, in bytes."""
        return size.n_held(self.window) * self.token_bytes(rank, size.kv_type)

    def token_bytes(self, rank: int, kv_type: str) -> int:
        """Return the size of one token's key and value on `rank`, in bytes."""
        types = self.held_types(kv_type)
        width = row_bytes(KV_INFO[types.k], self.head_dim_k)
        if not self.v_in_k:
            width += row_bytes(KV_INFO[types.v], self.head_dim_v)
        return self.kv_heads.size(rank) * width

    def held_types(self, kv_type: str) -> KVTypes:
        """Return the stored types of keys and values; values inside keys have the keys' type."""
        types = kv_types(kv_type)
        return KVTypes(types.k, types.k) if self.v_in_k else types

    def n_work(self, rank: int, n_tokens: int, n_ctx: int, step: Step) -> int:
        """Return the working memory of attention on `rank`; see `attention_work`."""
        return attention_work(self.heads.size(rank), self.row, n_tokens, n_ctx, step)

    @property
    def row(self) -> int:
        """Number of elements stored for a key and its value."""
        return self.head_dim_k + (0 if self.v_in_k else self.head_dim_v)

    def check_type(self, kv_type: str) -> None:
        """Check that keys and values consist of whole blocks of a KV type.

        Raises:
            EngineError: they do not.
        """
        types = self.held_types(kv_type)
        for noun, held, size in (
            (Sentence("keys"), types.k, self.head_dim_k),
            (Sentence("values"), types.v, self.head_dim_v),
        ):
            info = KV_INFO[held]
            if size % info.block_size:
                raise EngineError(
                    "This model's {parts} have {size} elements, but a {type} KV cache stores"
                    " them in blocks of {block}.",
                    "Choose the KV cache type f16.",
                    parts=noun, size=size, type=info.name, block=info.block_size,
                )  # fmt: skip


def attention_work(heads: int, row: int, n_tokens: int, n_ctx: int, step: Step) -> int:
    """Return attention's working memory for `n_tokens` tokens, in F32 elements.

    An upper bound, excluding queries and results: keys and values read from the cache, counted
    twice as they may be quantised, and the scores with their mask and biases.

    Args:
        heads: number of query heads.
        row: number of elements in a key and its value.
    """
    width = heads * row
    keys = min(width * n_ctx, max(width, step.keys))
    return 2 * keys + 3 * min(heads * n_tokens * n_ctx, max(heads, step.scores))


class RecurrentState:
    """Named F32 tensors of one recurrent layer; their size does not depend on the context.

    Args:
        tensors: each tensor's units per rank, in one or several segments, and the shape of a unit.
    """

    def __init__(self, **tensors: tuple[Ranges | tuple[Ranges, ...], tuple[int, ...]]) -> None:
        self._tensors = tensors

    def cuts(self) -> dict[str, Segments]:
        """Return the split of each tensor's units over ranks."""
        return {
            name: (cuts,) if isinstance(cuts, Ranges) else cuts
            for name, (cuts, _) in self._tensors.items()
        }

    def slice_key(self, rank: int) -> object:
        """Return a key that is equal for ranks with the same units, even in different splits."""
        return tuple(cut.spans[rank] for cuts in self.cuts().values() for cut in cuts)

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor on `rank`, units first."""
        return {
            name: (sum(segment.size(rank) for segment in segments), *self._tensors[name][1])
            for name, segments in self.cuts().items()
        }

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes on a rank that has every unit once."""
        return {
            name: (sum(segment.total for segment in segments), *self._tensors[name][1])
            for name, segments in self.cuts().items()
        }

    def n_bytes(self, rank: int, size: CacheSize) -> int:
        """Return the size of all slots on `rank`, in bytes."""
        return size.n_slots * self.sequence_bytes(rank)

    def sequence_bytes(self, rank: int) -> int:
        """Return the size of one sequence's tensors on `rank`, in bytes."""
        return F32_BYTES * sum(prod(shape) for shape in self.shapes(rank).values())

    def n_work(self, rank: int) -> int:
        """Return the elements per token that a prefill pass needs in addition to the residual
        stream.

        Estimated from measurements: a multiple of both dimensions of every head's matrix, or of the
        channels if there are no matrices.
        """
        return max(
            6 * n_units * sum(sides) if len(sides) == 2 else 8 * n_units
            for n_units, *sides in self.shapes(rank).values()
        )


State = KVState | RecurrentState  # a layer's memory of previous tokens


def windows_of(states: Iterable[State]) -> tuple[AttentionWindow, ...]:
    """Return the distinct windows of a model's layers; each defines a group of layers.

    The order does not depend on the split, because every rank declares all layers, even if it has
    no part of them.
    """
    return in_order(state.window for state in states if isinstance(state, KVState))


SHARED_ROWS = 10 << 10
"""Maximum number of rows (tokens times heads) for which keys are distributed over several programs:
64 for each of a GPU's 160 multiprocessors."""


class AttentionSize(NamedTuple):
    """Sizes that determine the working memory of one layer's attention on a rank.

    `row` is the number of elements in a key and its value, which may share them (`is_shared`).
    """

    heads: int
    kv_heads: int
    row: int
    is_shared: bool


def pieces_bytes(cache: AttentionSize, n_tokens: int, n_ctx: int, are_singles: bool = False) -> int:
    """Return the size of attention's partial results, one per piece of the keys, in bytes.

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
    """Return the maximum memory that attention needs on the CPU, excluding queries and results.

    This covers each thread's scratch memory for a tile and a block of keys and values, and the
    per-page results for a few tokens; see `engine.backends.cpu.kernels.cache.query_heads`.
    """
    width = cache.row if cache.is_shared else cache.row // 2
    result = result_bytes(width)
    n_results = MAX_AT_ONCE * cache.heads * -(-n_ctx // PAGE)
    per_head = F32_BYTES * width + 2 * result
    group = min(-(-cache.heads // cache.kv_heads), ATTENTION_HEADS)
    scratch = max(ATTENTION_TILE_BYTES, group * per_head)
    scratch += F32_BYTES * ATTENTION_BLOCK * (ATTENTION_HEADS + 2 * width)
    return usable_cores() * scratch + min(ATTENTION_RESULTS_BYTES, n_results * result)


def result_bytes(width: int) -> int:
    """Return the size of an attention result for one page, in bytes: whole vectors, plus one."""
    return (-(-F32_BYTES * width // ATTENTION_VECTOR_BYTES) + 1) * ATTENTION_VECTOR_BYTES
