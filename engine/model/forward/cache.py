"""KV cache and recurrent states of one rank, split like the heads that use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.formats.gguf.tensors import row_bytes
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.encode import quantise
from engine.hardware.host_memory import HostTensor
from engine.model.forward.pages import PAGE, AttentionWindow
from engine.model.forward.state import (
    KV_INFO,
    CacheSize,
    KVState,
    RecurrentState,
    State,
    windows_of,
)
from engine.model.sharding.split import head_groups

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch, Piece
    from engine.model.sharding.shares import Ranges

UNIT = 512  # alignment of the values after the keys, in bytes

DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16
}  # fmt: skip
"""Torch dtypes of unquantised KV types; block-quantised types are stored as bytes."""


class LayerCache:
    """Keys and values of one layer on one rank.

    A *slot* holds one token; `Piece.runs` maps positions to slots.

    Attributes:
        types: types of keys and of values; block-quantised ones require heads that consist of whole
            GGML blocks.
        is_shared: whether values are part of the keys, so that both are stored once (MLA).
        k: keys, (the rank's n_head_kv, n_slots, head_dim_k); for block-quantised types their bytes,
            uint8 (the rank's n_head_kv, n_slots, bytes per key).
        v: values, in the same layout; a view of `k` if values are part of keys.
        head_dim_v: number of elements in a value.
        head_map: row of k and v for each query head; None if each row serves the same number of
            adjacent heads.
        width: number of elements per token that `read` returns.
        is_on_host: whether `k` and `v` are in host memory.
        group: group of layers that share page tables.
    """

    is_on_host = False

    def __init__(
        self, state: KVState, rank: int, n_slots: int, kv_type: str, device: torch.device,
        group: int = 0,
    ) -> None:  # fmt: skip
        self.group = group
        self.types = types = state.held_types(kv_type)
        self.is_shared = state.v_in_k
        self.head_dim_v = state.head_dim_v
        width_k, width_v = (
            row_bytes(KV_INFO[types.k], state.head_dim_k),
            row_bytes(KV_INFO[types.v], state.head_dim_v),
        )
        n_kv = state.kv_heads.size(rank)
        n_k, n_v = n_kv * n_slots * width_k, 0 if self.is_shared else n_kv * n_slots * width_v
        begin = -(-n_k // UNIT) * UNIT if n_v else n_k
        whole = self._zeros(begin + n_v, device)
        self.k = _typed(whole[:n_k], types.k).view(n_kv, n_slots, -1)
        if self.is_shared:
            self.v = self.k[..., : width_v // self.k.element_size()]
        else:
            self.v = _typed(whole[begin:], types.v).view(n_kv, n_slots, -1)
        width = state.head_dim_k + (0 if self.is_shared else state.head_dim_v)
        rows = head_rows(state.heads, state.kv_heads, rank)
        self.head_map = None if rows is None else torch.tensor(rows, device=device)
        self.width = width * self.n_row

    @property
    def n_row(self) -> int:
        """Number of rows that `read` returns: key-value heads, or query heads if there is a
        `head_map`."""
        return (self.k if self.head_map is None else self.head_map).shape[0]

    @property
    def n_bytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.k.nbytes + (0 if self.is_shared else self.v.nbytes)

    def held(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold keys and values; a single one if both share it."""
        return (self.k,) if self.is_shared else (self.k, self.v)

    def write(self, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        """Store k and v (T, n_head_kv, head_dim) at the positions of a batch's rows.

        v is None if values are part of keys.
        """
        row = 0
        for piece in batch.pieces:
            for slots in piece.runs(self.group, piece.n_past, piece.stop):
                rows = slice(row, row + len(slots))
                target = slice(slots.start, slots.stop)
                self.k[:, target].copy_(_stored(k[rows], self.types.k).transpose(0, 1))
                if v is not None:
                    self.v[:, target].copy_(_stored(v[rows], self.types.v).transpose(0, 1))
                row = rows.stop

    def read(self, piece: Piece, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys and values at some positions, F32 (`n_row`, stop - start,
        head_dim)."""
        slots = [slice(run.start, run.stop) for run in piece.runs(self.group, start, stop)]
        k = _dequantised(self._fetched_all(self.k, slots), self.types.k)
        if self.is_shared:
            v = k[..., : self.head_dim_v]
        else:
            v = _dequantised(self._fetched_all(self.v, slots), self.types.v)
        if self.head_map is not None:
            k, v = k[self.head_map], v[self.head_map]
        return k, v

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of page `source` to page `target`."""
        for held in self.held():
            to, page = (held[:, index * PAGE : (index + 1) * PAGE] for index in (target, source))
            to.copy_(page)

    def _zeros(self, n: int, device: torch.device) -> Tensor:
        """Allocate keys and values in one piece, which wastes less GPU memory."""
        return torch.zeros(n, dtype=torch.uint8, device=device)

    def _fetched_all(self, held: Tensor, slots: Sequence[slice]) -> Tensor:
        parts = [self._fetched(held[:, part]) for part in slots]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _fetched(self, held: Tensor) -> Tensor:
        return held


class HostLayerCache(LayerCache):
    """A layer's KV cache in host memory; attention copies the visible part to its device."""

    is_on_host = True

    def _zeros(self, n: int, device: torch.device) -> Tensor:
        self._device = device
        self._memory = HostTensor((n,), torch.uint8, device)
        return self._memory.value

    def _fetched(self, held: Tensor) -> Tensor:
        copy = torch.empty(held.shape, dtype=held.dtype, device=self._device)
        for target, source in zip(copy, held, strict=True):  # a head's positions are contiguous
            target.copy_(source, non_blocking=True)
        return copy


def _typed(memory: Tensor, held: str) -> Tensor:
    return memory.view(DTYPES.get(held, torch.uint8))


def _stored(x: Tensor, held: str) -> Tensor:
    return x if held in DTYPES else quantise(x, KV_INFO[held].number)


def _dequantised(x: Tensor, held: str) -> Tensor:
    return x.float() if held in DTYPES else dequantise(x, KV_INFO[held].number)


def head_rows(heads: Ranges, kv_heads: Ranges, rank: int) -> list[int] | None:
    """Return the local key-value head for each local query head; None if all serve equally many."""
    rows = head_groups(heads, kv_heads, rank)
    n_kv = kv_heads.size(rank)
    per_kv = len(rows) // n_kv
    is_regular = per_kv * n_kv == len(rows) and rows == [i // per_kv for i in range(len(rows))]
    return None if is_regular else rows


class StateSlots:
    """Recurrent states of one layer, initially zero, with a slot per sequence.

    Args:
        shapes: shapes of a sequence's tensors by name.

    Attributes:
        together: tensors of all sequences by name, each (n_slots, ...).
        of_each: each sequence's views of them.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], n_slots: int, device: torch.device
    ) -> None:
        self.together = {
            name: torch.zeros(n_slots, *shape, device=device) for name, shape in shapes.items()
        }
        self.of_each = [
            {name: tensor[slot] for name, tensor in self.together.items()}
            for slot in range(n_slots)
        ]


class Cache:
    """KV cache and recurrent states of all layers on one rank.

    Args:
        states: declarations of the layers to allocate right away.
        windows: window of each group of layers; see `windows_of`; None to take them from `states`.
        kv_on_host: whether keys and values are in host memory.

    Attributes:
        n_slots: number of slots for recurrent states, one per sequence.
    """

    def __init__(
        self, states: Sequence[State], rank: int, size: CacheSize, device: torch.device,
        windows: Sequence[AttentionWindow] | None = None, *, kv_on_host: bool = False,
    ) -> None:  # fmt: skip
        self.kv_on_host = kv_on_host
        self.n_slots = size.n_slots
        self._rank, self._size, self._device = rank, size, device
        self._windows = windows_of(states) if windows is None else windows
        self._kv: dict[KVState, LayerCache] = {}
        self._recurrent: dict[RecurrentState, StateSlots] = {}
        for state in states:
            self.add(state)

    def add(self, state: State) -> None:
        """Allocate memory for another layer, filled with zeros."""
        if isinstance(state, RecurrentState):
            shapes = state.shapes(self._rank)
            self._recurrent[state] = StateSlots(shapes, self.n_slots, self._device)
        elif state.kv_heads.size(self._rank):
            layer_type = HostLayerCache if self.kv_on_host else LayerCache
            self._kv[state] = layer_type(
                state, self._rank, self._size.n_held(state.window), self._size.kv_type,
                self._device, self._windows.index(state.window),
            )  # fmt: skip

    def allocation(self, state: State) -> tuple[torch.device, int]:
        """Return the device on which `add` allocates memory for a layer, and the number of
        bytes."""
        is_on_host = self.kv_on_host and isinstance(state, KVState)
        device = torch.device("cpu") if is_on_host else self._device
        return device, state.n_bytes(self._rank, self._size)

    def memory_key(self, state: State) -> object:
        """Return a key that is equal in caches that can `take` this layer's memory."""
        return self._device, *self.allocation(state), state.slice_key(self._rank)

    def drop(self, state: State) -> None:
        """Free a layer's memory, if it has any."""
        if isinstance(state, RecurrentState):
            self._recurrent.pop(state, None)
        else:
            self._kv.pop(state, None)

    def take(self, state: State, other: Cache, other_state: State) -> None:
        """Move a layer's memory here from `other`, where its declaration is `other_state`."""
        if isinstance(state, RecurrentState):
            assert isinstance(other_state, RecurrentState)
            self._recurrent[state] = other._recurrent.pop(other_state)
        elif state.kv_heads.size(self._rank):
            assert isinstance(other_state, KVState)
            self._kv[state] = other._kv.pop(other_state)

    def tensors(self, state: State, slot: int = 0) -> dict[str, Tensor]:
        """Return a layer's tensors on this rank, by the names in `state.cuts()`.

        `slot` selects a sequence's recurrent states; keys and values are in slot 0 only.
        """
        if isinstance(state, RecurrentState):
            return self._recurrent[state].of_each[slot]
        layer = self._kv.get(state)
        if layer is None or slot:
            return {}
        return {"k": layer.k} if layer.is_shared else {"k": layer.k, "v": layer.v}

    @property
    def layers(self) -> list[LayerCache]:
        """Keys and values of this rank's layers, in the order of `add`."""
        return list(self._kv.values())

    def kv(self, state: KVState) -> LayerCache:
        """Return the keys and values of the layer that declared `state`; the rank must have some of
        its heads."""
        return self._kv[state]

    def states(self, state: RecurrentState, name: str) -> Tensor:
        """Return a tensor of the layer that declared `state`, for all slots: (n_slots, ...)."""
        return self._recurrent[state].together[name]

    def recurrent_tensors(self, state_slots: Iterable[int]) -> list[Tensor]:
        """Return the recurrent tensors in some slots; repeating a pass would change them again."""
        distinct = dict.fromkeys(state_slots)
        return [
            tensor
            for slots in self._recurrent.values()
            for slot in distinct
            for tensor in slots.of_each[slot].values()
        ]

    def reset(self, slot: int = 0) -> None:
        """Zero the recurrent states of a slot; keys and values are overwritten anyway."""
        for slots in self._recurrent.values():
            for tensor in slots.of_each[slot].values():
                tensor.zero_()

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page in all layers of a group."""
        for layer in self.layers:
            if layer.group == group:
                layer.copy_page(source, target)

    @property
    def host_bytes(self) -> int:
        """Size of another device's keys and values in host memory, in bytes; part of `n_bytes`."""
        return sum(layer.n_bytes for layer in self.layers if layer.is_on_host)

    @property
    def n_bytes(self) -> int:
        """Size of the whole cache in bytes."""
        recurrent = sum(tensor.nbytes for tensor in self.recurrent_tensors(range(self.n_slots)))
        return sum(layer.n_bytes for layer in self.layers) + recurrent
