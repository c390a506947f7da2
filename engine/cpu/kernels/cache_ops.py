"""Writes to the KV cache and attention over it, on torch tensors.

As in `engine.cpu.kernels.small_ops`, methods return None or False where the kernels do not take the
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.config.kv_types import KVTypes
from engine.cpu.kernels import attention, cache_write, jit
from engine.cpu.kernels.cache_codec import CODECS
from engine.cpu.kernels.fastcall import BoundKernel, Kernel, bind_both
from engine.cpu.kernels.isa import Isa, chosen, supported
from engine.cpu.kernels.small_ops import F32, SHORT_CALL, f32_bits, is_plain, row_layout
from engine.cpu.kernels.team import Team

if TYPE_CHECKING:
    from engine.forward.cache import LayerCache
    from engine.forward.operands import Scores

SHORT_READ = 1 << 18
"""Largest number of elements of the cache, read in about 0.1 ms, for which a call keeps Python's
lock."""

MAX_TOKENS = 8
"""Largest number of tokens of a call of attention, which computes one after the other. For more,
it is faster to convert the cache to F32 once and use torch."""

DTYPES = {
    "f32": F32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type that holds each type of keys and values."""


@cache
def _store(isa_name: str, kind: str) -> BoundKernel:
    """Compile the write of keys or values of a type for an instruction set."""
    isa = _isa(isa_name)
    build = partial(cache_write.build, isa=isa, kind=kind)
    address = jit.addresses_by_source(f"store-{kind}", isa, ["store"], build)["store"]
    return bind_both(address, len(cache_write.ARGUMENTS))


@cache
def _attend(isa_name: str, types: KVTypes) -> BoundKernel:
    """Compile attention over a cache of some types for an instruction set."""
    isa, name = _isa(isa_name), "-".join(("attend", *types))
    build = partial(attention.build, isa=isa, types=types)
    address = jit.addresses_by_source(name, isa, ["attend"], build)["attend"]
    return bind_both(address, len(attention.ARGUMENTS))


def _isa(name: str) -> Isa:
    return next(isa for isa in supported() if isa.name == name)


class CacheTensor:
    """The keys or the values of one layer, (n_kv, n_ctx, head_dim), as kernels address them.

    Attributes:
        n_kv, n_ctx, head_dim: numbers of key-value heads, of positions, and of elements of a head.
        address: address of the first element.
        stride, head_stride: bytes from position to position and from head to head.
        fits: whether the kernels can read it: on the CPU, in the type's layout, rows contiguous.
    """

    def __init__(self, held: Tensor, kind: str) -> None:
        codec, size = CODECS[kind], held.element_size()
        head_stride, stride, step = held.stride()
        self.n_kv, self.n_ctx, width = held.shape
        has_blocks = held.dtype == torch.uint8
        self.head_dim = width // codec.n_bytes * codec.width if has_blocks else width
        self.address = held.data_ptr()
        self.stride, self.head_stride = stride * size, head_stride * size
        self.fits = (
            held.is_cpu
            and held.dtype == DTYPES[kind]
            and step == 1
            and not (has_blocks and width % codec.n_bytes)
        )


class CacheLayer:
    """The KV cache of one layer as kernels address it, prepared once.

    Attributes:
        k, v: keys and values.
        is_served: whether the kernels can read both.
        store_k, store_v, attend: the kernels for the cache's types.
        heads: groups of query heads, by the number of query heads; None where they do not fit.
    """

    def __init__(self, held: LayerCache, isa_name: str) -> None:
        self._tensors = held.k, held.v
        self._head_map = None if held.head_map is None else held.head_map.tolist()
        self.k, self.v = CacheTensor(held.k, held.types.k), CacheTensor(held.v, held.types.v)
        self.is_served = self.k.fits and self.v.fits
        self.store_k, self.store_v = (_store(isa_name, kind) for kind in held.types)
        self.attend = _attend(isa_name, held.types)
        self.heads: dict[int, QueryGroups | None] = {}

    def is_of(self, held: LayerCache) -> bool:
        """Return whether the layer's cache still has the same tensors."""
        k, v = self._tensors
        return k is held.k and v is held.v

    def make_heads(self, n_heads: int) -> QueryGroups | None:
        """Group n query heads by key-value head; None if the cache is not for so many."""
        n_kv, rows = self.k.n_kv, self._head_map
        if rows is None and n_heads % n_kv == 0:
            rows = [head * n_kv // n_heads for head in range(n_heads)]
        if rows is None or len(rows) != n_heads or not all(0 <= row < n_kv for row in rows):
            return None
        return QueryGroups(self.k, self.v, rows)


class QueryGroups:
    """The query heads of a layer, in groups that share a key-value head.

    Args:
        k, v: keys and values.
        rows: index of the key-value head of each query head.

    Attributes:
        places: arguments of `attend` from `k` to `head_dim_v`.
        cut: arguments of `attend` from `groups` to `n_heads`.
        work_bytes: scratch memory of attention over the whole context, in bytes.
    """

    def __init__(self, k: CacheTensor, v: CacheTensor, rows: Sequence[int]) -> None:
        self._groups = np.array(_groups(rows), np.int64).reshape(-1, 3)
        self.places = (
            k.address, k.stride, k.head_stride, v.address, v.stride, v.head_stride, k.head_dim,
            v.head_dim,
        )  # fmt: skip
        self.cut = self._groups.ctypes.data, len(self._groups), len(rows)
        self.work_bytes = attention.work_bytes(len(rows), v.head_dim, k.n_ctx)


def _groups(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group adjacent query heads of one key-value head: that head, the first of them, how many."""
    groups: list[tuple[int, int, int]] = []
    head = 0
    for row, members in groupby(rows):
        stop = head + len(list(members))
        starts = range(head, stop, attention.HEADS)
        groups.extend((row, start, min(attention.HEADS, stop - start)) for start in starts)
        head = stop
    return groups


class CacheOps:
    """The operations on the KV cache, computed by one team.

    Args:
        team: threads that compute.
        isa: instruction set of the kernels; None for the best of this processor.
    """

    def __init__(self, team: Team, isa: Isa | None = None) -> None:
        self._team = team
        self._address = team.address
        self._isa_name = (isa or chosen()).name
        self._layers: WeakKeyDictionary[LayerCache, CacheLayer] = WeakKeyDictionary()
        self._work = torch.empty(0, dtype=torch.uint8)
        self._words = words = np.zeros(1, np.int64)  # the position of the first token
        self._position_word, self._position_address = words.data, words.ctypes.data
        self._spans: dict[tuple[int, int], VisibleSpans] = {}

    @property
    def memory(self) -> Tensor:
        """Scratch memory that calls write to."""
        return self._work

    def move(self, n_past: int) -> None:
        """Set the position of the token that recorded calls are replayed for."""
        self._position_word[0] = n_past
        for spans in self._spans.values():
            spans.set(n_past, 1)

    def write(self, held: LayerCache, k: Tensor, v: Tensor | None, start: int) -> bool:
        """Write keys and values as `LayerCache.write` does; return whether the kernels could."""
        layer = self._layer(held)
        first = _writing(k, layer.k, start)
        second = () if v is None else _writing(v, layer.v, start)
        if not layer.is_served or first is None or second is None:
            return False
        self._position_word[0] = start
        is_short = k.numel() <= SHORT_CALL
        if not is_short:
            self._team.wake()
        for kernel, given in ((layer.store_k, first), (layer.store_v, second)):
            if given:
                run = kernel.with_gil if is_short else kernel.without_gil
                run(self._address, *given, self._position_address)
        return True

    def attention(
        self, q: Tensor, held: LayerCache, n_past: int, scores: Scores,
        sinks: Tensor | None, slopes: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Compute `ReferenceOps.attention` for up to `MAX_TOKENS` tokens, one after the other."""
        layer = self._layer(held)
        n_tokens, n_heads, head_dim = q.shape
        if n_heads not in layer.heads:
            layer.heads[n_heads] = layer.make_heads(n_heads)
        heads = layer.heads[n_heads]
        vectors: tuple[int | None, ...] = 0, 0
        if sinks is not None or slopes is not None:
            vectors = _address(sinks, n_heads), _address(slopes, n_heads)
        if heads is None or not layer.is_served or not is_plain(q) or None in vectors:
            return None
        if head_dim != layer.k.head_dim or n_tokens > MAX_TOKENS:
            return None
        if not 0 <= n_past <= layer.k.n_ctx - n_tokens:
            return None
        out = torch.empty(n_tokens, n_heads, layer.v.head_dim)
        query, goal = q.data_ptr(), out.data_ptr()
        factors = f32_bits(scores.scale), f32_bits(scores.softcap)
        work, spans = self._memory(heads.work_bytes), self._spans_of(scores)
        spans.set(n_past, n_tokens)
        run = self._binding(layer, n_past + n_tokens)
        for span in spans.addresses[:n_tokens]:
            run(
                self._address, query, *heads.places, span, *heads.cut, *factors, *vectors, work,
                goal,
            )  # fmt: skip
            query += 4 * n_heads * head_dim
            goal += 4 * n_heads * layer.v.head_dim
        return out

    def _spans_of(self, scores: Scores) -> VisibleSpans:
        """Return the spans of a window and chunk, made at their first use."""
        key = scores.window, scores.chunk
        spans = self._spans.get(key)
        if spans is None:
            spans = self._spans[key] = VisibleSpans(scores)
        return spans

    def _layer(self, held: LayerCache) -> CacheLayer:
        """Return a layer's cache as prepared, anew if its tensors have changed."""
        layer = self._layers.get(held)
        if layer is None or not layer.is_of(held):
            layer = self._layers[held] = CacheLayer(held, self._isa_name)
        return layer

    def _memory(self, n_bytes: int) -> int:
        """Return the address of `n_bytes` of scratch memory, which the next call overwrites."""
        if self._work.numel() < n_bytes:
            self._work = torch.empty(n_bytes, dtype=torch.uint8)
        return self._work.data_ptr()

    def _binding(self, layer: CacheLayer, n_positions: int) -> Kernel:
        """Return the binding of attention for so many positions; wake the workers if many."""
        k, v = layer.k, layer.v
        if n_positions * k.n_kv * (k.head_dim + v.head_dim) <= SHORT_READ:
            return layer.attend.with_gil
        self._team.wake()
        return layer.attend.without_gil


class VisibleSpans:
    """The positions that tokens attend to, for all layers with one window and chunk.

    Attributes:
        addresses: for each of `MAX_TOKENS` tokens, the address of two integers: the first visible
            position, and the one after the last.
    """

    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._numbers = np.zeros((MAX_TOKENS, 2), np.int64)
        self._words = self._numbers.reshape(-1).data
        start, step = self._numbers.ctypes.data, self._numbers.strides[0]
        self.addresses = [start + step * n for n in range(MAX_TOKENS)]

    def set(self, n_past: int, n_tokens: int) -> None:
        """Set the spans of `n_tokens` tokens that follow `n_past` others."""
        for n in range(n_tokens):
            self._words[2 * n] = self._scores.first_visible(n_past + n)
            self._words[2 * n + 1] = n_past + n + 1


def _writing(x: Tensor, cells: CacheTensor, start: int) -> tuple[int, ...] | None:
    """Return the arguments of `store` for x from position `start` on, None if it does not fit."""
    rows = row_layout(x)
    if rows is None or rows[3:] != (cells.n_kv, cells.head_dim):
        return None
    if not 0 <= start <= cells.n_ctx - rows[2]:
        return None
    return x.data_ptr(), *rows, cells.address, cells.stride, cells.head_stride


def _address(vector: Tensor | None, n: int) -> int | None:
    """Return the address of n F32 numbers, 0 if there are none, None if they do not fit."""
    if vector is None:
        return 0
    return vector.data_ptr() if is_plain(vector) and vector.shape == (n,) else None
