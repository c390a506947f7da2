"""Declarations of layers' KV caches and recurrent states, which the runtime allocates per rank.

A layer keeps its declaration as an attribute and passes it to `Context` to reach the memory. So the
planner counts exactly the bytes that are allocated later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from gguf.constants import GGMLQuantizationType

from engine.errors import EngineError
from engine.formats.gguf.types import TYPES, TypeInfo, row_bytes
from engine.load_params import KV_TYPES, KVTypes, kv_types
from engine.model.forward.attention_window import EVERYTHING, Sight, in_order
from engine.model.sharding.ranges import Ranges
from engine.model.sharding.recut import Segments

if TYPE_CHECKING:
    from engine.model.forward.cache_size import CacheSize

F32_BYTES = 4
"""Bytes of an F32 number."""

KV_INFO: Mapping[str, TypeInfo] = MappingProxyType(
    {name: TYPES[GGMLQuantizationType[name.upper()]] for name in KV_TYPES}
)
"""GGML type of the rows of keys, or of values, by their type."""


@dataclass(frozen=True, slots=True)
class Step:
    """Working set of one step of attention over a cache, in F32 elements.

    Attributes:
        keys: number of elements of the keys and values read from the cache.
        scores: number of scores of queries with these keys.
    """

    keys: int
    scores: int


CPU_STEP = Step(keys=1 << 21, scores=1 << 19)
"""Step on a CPU in torch: the keys of one head and its scores stay in a core's caches."""

ATTENTION_BLOCK = 64
"""Positions of a block of keys and values, at which the CPU's kernels of attention work at once."""

ATTENTION_HEADS = 64
"""Largest number of query heads that these kernels compute together for one token."""

ATTENTION_VECTOR_BYTES = 64
"""Size of the vectors that they compute with, of which queries and results fill whole ones."""

ATTENTION_TILE_BYTES = 512 << 10
"""Bytes that their queries and results of several tokens shall not exceed: they stay in a core's
cache."""

ATTENTION_RESULTS_BYTES = 32 << 20
"""Largest size of their results of all pages, which are merged at the end."""

DEVICE_STEP = Step(keys=1 << 24, scores=1 << 24)
"""Step on other devices: long enough to hide the latency of kernel launches."""


class KVState:
    """Keys and values of one attention layer, cut like the heads that use them.

    Args:
        heads: query heads of each rank.
        kv_heads: key-value heads of each rank.
        head_dim_k: number of elements of a key.
        head_dim_v: number of elements of a value.
        sight: how far back any layer looks that attends to them.
        v_in_k: whether values are the first `head_dim_v` elements of the keys, held once (MLA).
    """

    def __init__(
        self, heads: Ranges, kv_heads: Ranges, head_dim_k: int, head_dim_v: int,
        sight: Sight = EVERYTHING, *, v_in_k: bool = False,
    ) -> None:  # fmt: skip
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_v
        self.sight = sight
        self.v_in_k = v_in_k

    def cuts(self) -> dict[str, Segments]:
        """Return the cut of the first dimension over ranks: of "k", and of "v" if it is held."""
        return dict.fromkeys("k" if self.v_in_k else "kv", (self.kv_heads,))

    def slice_key(self, rank: int) -> object:
        """Return a key that is equal for ranks, also of other cuts, that hold the same heads."""
        return self.heads.spans[rank], self.kv_heads.spans[rank]

    def n_bytes(self, rank: int, size: CacheSize) -> int:
        """Return the bytes of `rank`."""
        return size.n_held(self.sight) * self.token_bytes(rank, size.kv_type)

    def token_bytes(self, rank: int, kv_type: str) -> int:
        """Return the bytes of one token's key and value on `rank`."""
        types = self.held_types(kv_type)
        width = row_bytes(KV_INFO[types.k], self.head_dim_k)
        if not self.v_in_k:
            width += row_bytes(KV_INFO[types.v], self.head_dim_v)
        return self.kv_heads.size(rank) * width

    def held_types(self, kv_type: str) -> KVTypes:
        """Return in which types keys and values are held: values in keys have the keys' type."""
        types = kv_types(kv_type)
        return KVTypes(types.k, types.k) if self.v_in_k else types

    def n_work(self, rank: int, n_tokens: int, n_ctx: int, step: Step) -> int:
        """Return the working memory of attention of `n_tokens` tokens on `rank`, in F32 elements.

        See `attention_work`.
        """
        return attention_work(self.heads.size(rank), self.row, n_tokens, n_ctx, step)

    @property
    def row(self) -> int:
        """Number of elements of a key and its value, as they are held."""
        return self.head_dim_k + (0 if self.v_in_k else self.head_dim_v)

    def check_type(self, kv_type: str) -> None:
        """Make sure that keys and values are whole blocks of a KV type.

        Raises:
            EngineError: they are not; it says which type to choose.
        """
        types = self.held_types(kv_type)
        for noun, held, size in (
            ("keys", types.k, self.head_dim_k), ("values", types.v, self.head_dim_v)
        ):  # fmt: skip
            info = KV_INFO[held]
            if size % info.block_size:
                raise EngineError(
                    f"This model's {noun} have {size} elements, but a KV cache in {info.name} "
                    f"holds them in blocks of {info.block_size}.",
                    "Choose the KV type f16.",
                )


def attention_work(heads: int, row: int, n_tokens: int, n_ctx: int, step: Step) -> int:
    """Return the working memory of attention of `n_tokens` tokens, in F32 elements.

    It comes on top of queries and results, and is an upper bound: keys and values read from the
    cache, twice because they may be quantised, and the scores with what is added to them.

    Args:
        heads: number of query heads.
        row: number of elements of a key and its value.
    """
    width = heads * row
    keys = min(width * n_ctx, max(width, step.keys))
    return 2 * keys + 3 * min(heads * n_tokens * n_ctx, max(heads, step.scores))


class RecurrentState:
    """Named F32 tensors of one recurrent layer; their size does not depend on the context.

    Args:
        tensors: pair of each tensor by name: the units of each rank, in one or several segments,
            and the shape of one unit.
    """

    def __init__(self, **tensors: tuple[Ranges | tuple[Ranges, ...], tuple[int, ...]]) -> None:
        self._tensors = tensors

    def cuts(self) -> dict[str, Segments]:
        """Return the cut of each tensor's units over ranks, by the tensor's name."""
        return {
            name: (cuts,) if isinstance(cuts, Ranges) else cuts
            for name, (cuts, _) in self._tensors.items()
        }

    def slice_key(self, rank: int) -> object:
        """Return a key that is equal for ranks, also of other cuts, that hold the same units."""
        return tuple(cut.spans[rank] for cuts in self.cuts().values() for cut in cuts)

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor on `rank`, by name: its units first."""
        return {
            name: (sum(segment.size(rank) for segment in segments), *self._tensors[name][1])
            for name, segments in self.cuts().items()
        }

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes on a rank that has all units, each once."""
        return {
            name: (sum(segment.total for segment in segments), *self._tensors[name][1])
            for name, segments in self.cuts().items()
        }

    def n_bytes(self, rank: int, size: CacheSize) -> int:
        """Return the bytes of `rank`: of as many sequences as have states on the devices."""
        return size.n_slots * self.sequence_bytes(rank)

    def sequence_bytes(self, rank: int) -> int:
        """Return the bytes of one sequence's tensors on `rank`."""
        return F32_BYTES * sum(prod(shape) for shape in self.shapes(rank).values())

    def n_work(self, rank: int) -> int:
        """Return the elements per token that a prefill pass needs beside the residual stream.

        This is an estimate from measurements: some copies of both sides of every head's matrix, or
        of the channels where these have no matrix.
        """
        return max(
            6 * n_units * sum(sides) if len(sides) == 2 else 8 * n_units
            for n_units, *sides in self.shapes(rank).values()
        )


State = KVState | RecurrentState
"""Memory of a layer for the tokens before."""


def sights_of(states: Iterable[State]) -> tuple[Sight, ...]:
    """Return the sights of the groups into which a model's layers fall, each once.

    Layers with equal sights are one group. The one that sees everything comes first, if there is
    one, then the others, the farthest first: an order that no split changes, as ranks declare all
    layers, also those of which they hold nothing.
    """
    return in_order(state.sight for state in states if isinstance(state, KVState))
