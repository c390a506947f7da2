"""Sizes of one rank's weights, KV cache and recurrent states, and the resulting bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Self

from engine.hardware.backend_choice import kernels_for
from engine.hardware.devices.types import is_cpu
from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.forward.pages import NO_WINDOW, AttentionWindow
from engine.model.forward.state import F32_BYTES, CacheSize, KVState, State
from engine.planning.footprint import (
    TensorPart,
    WorkingSizes,
    compute_bytes,
    n_elements,
    packed_bytes,
    padding_of_parts,
    tensor_parts,
    word_bytes,
    x_bytes,
)
from engine.planning.memory import MemoryUse, link_bytes, padding_bytes, pinned_bytes

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.layers.hparams import HParams


class LayerCacheBytes(NamedTuple):
    """Bytes of one layer's cache on a rank.

    Attributes:
        token: key and value bytes per token.
        tensors: bytes of each recurrent tensor, per sequence.
    """

    token: int = 0
    window: AttentionWindow = NO_WINDOW
    tensors: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: State, rank: int, kv_type: str) -> LayerCacheBytes:
        """Return the bytes of a declared cache or state on `rank`."""
        if isinstance(state, KVState):
            return cls(state.token_bytes(rank, kv_type), state.window)
        return cls(tensors=tuple(F32_BYTES * prod(s) for s in state.shapes(rank).values()))


class CacheBytes(NamedTuple):
    """Bytes of a rank's cache: keys and values, recurrent states, and padding of both on a GPU."""

    kv: int
    state: int
    kv_padding: int
    state_padding: int


def cache_bytes(layers: Iterable[tuple[int, LayerCacheBytes]], size: CacheSize) -> CacheBytes:
    """Return the bytes of a rank's cache, given pairs of a count and the bytes per layer."""
    kv = state = kv_padding = state_padding = 0
    for n, layer in layers:
        n_bytes = layer.token * size.n_held(layer.window)
        kv += n * n_bytes
        kv_padding += n * padding_bytes(n_bytes)
        state += n * size.n_slots * sum(layer.tensors)
        state_padding += n * size.n_slots * sum(map(padding_bytes, layer.tensors))
    return CacheBytes(kv, state, kv_padding, state_padding)


class RankSize(NamedTuple):
    """Bytes for some tensors and states, or for everything on a rank.

    Loading counts all tensors on a rank once; dragging the split counts one block's part once and
    multiplies it. Both give the same sum.

    Attributes:
        padding: bytes that rounding up adds to them on a GPU.
        layers: pairs of a number of equal layers and the cache bytes per layer.
        words: bytes that int16 panels add to the weights; see `word_bytes`.
    """

    weights: int = 0
    padding: int = 0
    layers: tuple[tuple[int, LayerCacheBytes], ...] = ()
    elements: int = 0
    file_bytes: int = 0
    working: WorkingSizes = WorkingSizes()
    words: int = 0

    @classmethod
    def of(
        cls, parts: Sequence[TensorPart], states: Sequence[State], rank: int, storage: str,
        kv_type: str,
    ) -> Self:  # fmt: skip
        """Count a rank's parts of some tensors, and their layers' caches."""
        weights = elements = file_bytes = words = 0
        for slot, pieces, sizes in parts:
            weights += sum(sizes)
            elements += sum(map(n_elements, pieces)) if slot.is_matrix else 0
            file_bytes += sum(packed_bytes(slot, piece) for piece in pieces)
            words += word_bytes(slot, pieces)
        padding = padding_of_parts(parts, storage)
        layers = tuple((1, LayerCacheBytes.of(state, rank, kv_type)) for state in states)
        working = WorkingSizes.of_states(states, rank)
        return cls(weights, padding, layers, elements, file_bytes, working, words)

    @classmethod
    def total(cls, sizes: Iterable[tuple[int, RankSize]]) -> Self:
        """Add up pairs of a count and a size, but take the maximum of working sizes."""
        weights = padding = elements = file_bytes = words = 0
        layers, working = list[tuple[int, LayerCacheBytes]](), list[WorkingSizes]()
        for n, size in sizes:
            weights += n * size.weights
            padding += n * size.padding
            layers += [(n * m, layer) for m, layer in size.layers]
            elements += n * size.elements
            file_bytes += n * size.file_bytes
            working.append(size.working)
            words += n * size.words
        largest = WorkingSizes.largest(working)
        return cls(weights, padding, tuple(layers), elements, file_bytes, largest, words)


def rank_size(declaration: Declaration, rank: int, storage: str, kv_type: str) -> RankSize:
    """Return the sizes for a rank in a declared model; see `RankSize.of`."""
    split = declaration.split
    parts = tensor_parts(declaration.slots, rank, storage)
    size = RankSize.of(parts, declaration.states, rank, storage, kv_type)
    working = [size.working, WorkingSizes(rows=split.output.size(rank))]
    working += [WorkingSizes.of_block(block, rank) for block in split.blocks]
    return size._replace(working=WorkingSizes.largest(working))


def keeps_kv_on_host(params: LoadParams, device: str) -> bool:
    """Return whether the KV cache of a rank on `device` is kept in host memory."""
    return params.kv_on_host and not is_cpu(device)


def rank_memory(
    params: LoadParams, hp: HParams, device: str, storage: str, size: RankSize, n_meeting: int,
    n_batch: int, n_guessed: int = 0,
) -> MemoryUse:  # fmt: skip
    """Return the predicted bytes for a rank; `n_meeting` ranks exchange values on GPUs."""
    is_on_host, is_busy = keeps_kv_on_host(params, device), size.working != WorkingSizes()
    n_checked = (1 if is_cpu(device) else params.parallel) * (1 + params.n_draft)
    compute = compute_bytes(
        size.working, hp, min(n_batch, hp.n_ctx), hp.n_ctx, device, storage,
        is_kv_on_host=is_on_host, fast_prompts=params.fast_prompts,
        n_parallel=params.parallel, n_checked=min(n_checked, MAX_AT_ONCE) if params.n_draft else 0,
    )  # fmt: skip
    cache = cache_bytes(size.layers, CacheSize.asked(params, hp.n_ctx, n_batch, n_guessed))
    # another machine cannot know whether this processor multiplies int16, so the larger size counts
    has_words = storage == "kernels" and kernels_for(device) == "cpu" and x_bytes(hp) == 1
    use = MemoryUse(
        weights=size.weights + has_words * size.words,
        kv=cache.state + (0 if is_on_host else cache.kv),
        compute=compute + (link_bytes(n_meeting) if is_busy else 0),
        host_kv=cache.kv if is_on_host else 0,
    )
    if is_cpu(device):
        return use
    has_pinned = is_busy and storage == "kernels"
    return replace(
        use,
        padding=size.padding + cache.state_padding + (0 if is_on_host else cache.kv_padding),
        pinned=pinned_bytes(n_meeting, size.file_bytes, hp.n_vocab) if has_pinned else 0,
    )
