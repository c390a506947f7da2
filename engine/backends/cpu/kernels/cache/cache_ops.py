"""KV cache writes and attention for torch tensors.

As in `kernels.small.small_ops`, methods return None or False for tensors that the kernels do not
support.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.backends.cpu.kernels.cache import attention, cache_codec
from engine.backends.cpu.kernels.cache.cache_codec import CacheTensor
from engine.backends.cpu.kernels.cache.query_heads import GroupTables, PassRows, QueryHeads
from engine.backends.cpu.kernels.language.isa import Isa, chosen, named
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.fastcall import BoundKernel, bind_both
from engine.backends.cpu.kernels.running.result_memory import GrowingMemory, result
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small.small_ops import SHORT_CALL, f32_bits, is_plain, row_layout
from engine.load_params import KVTypes
from engine.model.forward.batch import MAX_AT_ONCE

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import Scores

SHORT_READ = 1 << 18
"""Calls that read at most this many cache elements, which take about 0.1 ms, keep the GIL."""


@cache
def _store(isa_name: str, kind: str) -> BoundKernel:
    isa = named(isa_name)
    build = partial(cache_codec.build, isa=isa, kind=kind)
    address = jit.addresses_by_source(f"store-{kind}", isa, ["store"], build)["store"]
    return bind_both(address, len(cache_codec.ARGUMENTS))


@cache
def _attend(isa_name: str, types: KVTypes) -> BoundKernel:
    isa, name = named(isa_name), "-".join(("attend", *types))
    build = partial(attention.build, isa=isa, types=types)
    address = jit.addresses_by_source(name, isa, ["attend"], build)["attend"]
    return bind_both(address, len(attention.ARGUMENTS))


class CacheLayer:
    """One layer's KV cache as kernels address it, prepared once.

    Attributes:
        k, v: keys and values.
        is_served: whether the kernels can read both.
        store_k, store_v, attend: the kernels for the cache's types.
        heads: query heads, by their count; None for counts that do not fit the cache.
    """

    def __init__(self, held: LayerCache, isa_name: str) -> None:
        self._tensors = held.k, held.v
        self._head_map = None if held.head_map is None else held.head_map.tolist()
        self.k, self.v = CacheTensor(held.k, held.types.k), CacheTensor(held.v, held.types.v)
        self.is_served = self.k.fits and self.v.fits
        self.store_k, self.store_v = (_store(isa_name, kind) for kind in held.types)
        self.attend = _attend(isa_name, held.types)
        self.heads: dict[int, QueryHeads | None] = {}

    def is_of(self, held: LayerCache) -> bool:
        k, v = self._tensors
        return k is held.k and v is held.v

    def make_heads(self, n_heads: int) -> QueryHeads | None:
        """Group n query heads by key-value head; return None if n does not fit the cache."""
        n_kv, rows = self.k.n_kv, self._head_map
        if rows is None and n_heads % n_kv == 0:
            rows = [head * n_kv // n_heads for head in range(n_heads)]
        if rows is None or len(rows) != n_heads or not all(0 <= row < n_kv for row in rows):
            return None
        return QueryHeads(self.k, self.v, rows)


class CacheOps:
    """Operations on the KV cache, computed by one pool.

    Args:
        pool: threads that compute.
        isa: instruction set of the kernels; None for the best that this processor supports.
    """

    def __init__(self, pool: ThreadPool, isa: Isa | None = None) -> None:
        self._pool = pool
        self._address = pool.address
        self._isa_name = (isa or chosen()).name
        self._layers: WeakKeyDictionary[LayerCache, CacheLayer] = WeakKeyDictionary()
        self._work = GrowingMemory(lambda n: torch.empty(n, dtype=torch.uint8))
        self._batch: Batch | None = None
        self._rows = PassRows(1)
        self._rows_of_singles = {1: self._rows}

    @property
    def memory(self) -> Tensor:
        """Scratch memory to which calls write."""
        return self._work.memory

    def begin(self, batch: Batch) -> None:
        """Write a pass's rows to the memory that its calls and recorded calls read."""
        n_rows = batch.n_rows
        if n_rows > MAX_AT_ONCE or not batch.is_of_singles:
            self._rows = PassRows(n_rows)
        elif n_rows in self._rows_of_singles:
            self._rows = self._rows_of_singles[n_rows]
        else:
            self._rows = self._rows_of_singles[n_rows] = PassRows(n_rows)
        self._rows.set(batch)
        self._batch = batch

    def write(self, held: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> bool:
        """Write keys and values as in `LayerCache.write`; return False if unsupported."""
        rows, layer = self._rows_of(batch), self._layer(held)
        tables = rows.tables(held.group)
        first = _writing(k, layer.k, rows, tables)
        second = () if v is None else _writing(v, layer.v, rows, tables)
        if not layer.is_served or first is None or second is None:
            return False
        for kernel, given in ((layer.store_k, first), (layer.store_v, second)):
            if given:
                kernel.chosen(self._pool, is_short=k.numel() <= SHORT_CALL)(self._address, *given)
        return True

    def attention(
        self, q: Tensor, held: LayerCache, batch: Batch, scores: Scores,
        sinks: Tensor | None, slopes: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Compute `Ops.attention`."""
        rows, layer = self._rows_of(batch), self._layer(held)
        n_rows, n_heads, head_dim = q.shape
        if n_heads not in layer.heads:
            layer.heads[n_heads] = layer.make_heads(n_heads)
        heads = layer.heads[n_heads]
        vectors: tuple[int | None, ...] = 0, 0
        if sinks is not None or slopes is not None:
            vectors = _address(sinks, n_heads), _address(slopes, n_heads)
        if heads is None or not layer.is_served or not is_plain(q) or None in vectors:
            return None
        if head_dim != layer.k.head_dim or n_rows != rows.n_rows:
            return None
        if rows.tables(held.group).n_slots > layer.k.n_slots:
            return None
        out = result(n_rows, n_heads, layer.v.head_dim)
        tiling = heads.tiling(rows, self._pool.n_threads)
        n_read = rows.n_seen * layer.k.n_kv * (layer.k.head_dim + layer.v.head_dim)
        layer.attend.chosen(self._pool, is_short=n_read <= SHORT_READ)(
            self._address, tiling.layer, rows.words(scores, held.group), q.data_ptr(),
            f32_bits(scores.scale), f32_bits(scores.softcap), *vectors, *tiling.arguments,
            self._work.tensor(tiling.n_bytes).data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def _rows_of(self, batch: Batch) -> PassRows:
        if batch is not self._batch:
            self.begin(batch)
        return self._rows

    def _layer(self, held: LayerCache) -> CacheLayer:
        layer = self._layers.get(held)
        if layer is None or not layer.is_of(held):
            layer = self._layers[held] = CacheLayer(held, self._isa_name)
        return layer


def _writing(
    x: Tensor, cells: CacheTensor, rows: PassRows, tables: GroupTables
) -> tuple[int, ...] | None:
    layout = row_layout(x)
    if layout is None or layout[2:] != (rows.n_rows, cells.n_kv, cells.head_dim):
        return None
    if tables.n_slots > cells.n_slots:
        return None
    places = cells.address, cells.stride, cells.head_stride, rows.positions, tables.address
    return x.data_ptr(), *layout, *places


def _address(vector: Tensor | None, n: int) -> int | None:
    """Return the address of a vector of n F32 numbers; 0 if it is None, None if unsupported."""
    if vector is None:
        return 0
    return vector.data_ptr() if is_plain(vector) and vector.shape == (n,) else None
