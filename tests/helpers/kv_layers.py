"""KV caches of single layers, full of random numbers."""

import torch
from torch import Tensor

from engine.backends.cpu.kernels.cache.attention_words import in_words
from engine.backends.cpu.kernels.language.isa import Isa, chosen
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges


def numbers(seed: int, *shape: int) -> Tensor:
    """Return random numbers, normally distributed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(
    kv_type: str, n_head: int, n_kv: int, dim_k: int, dim_v: int, n_ctx: int,
    *, v_in_k: bool = False,
) -> LayerCache:  # fmt: skip
    """Return a layer's cache full of random numbers."""
    heads, kv_heads = (Ranges(((0, n),), n) for n in (n_head, n_kv))
    state = KVState(heads, kv_heads, dim_k, dim_v, v_in_k=v_in_k)
    held = LayerCache(state, 0, n_ctx, kv_type, torch.device("cpu"))
    v = None if v_in_k else numbers(2, n_ctx, n_kv, dim_v)
    held.write(numbers(1, n_ctx, n_kv, dim_k), v, Batch.of_one(0, n_ctx, 0))
    return held


def as_multiplied(q: Tensor, held: LayerCache, isa: Isa | None = None) -> Tensor:
    """Return queries (…, head_dim) as the CPU's kernels multiply them with a layer's keys.

    With blocks of integers these are words with a scale for each 32 elements, where the
    instruction set multiplies words; otherwise they stay as they are.
    """
    if not in_words(isa or chosen(), held.types.k):
        return q
    blocks = q.reshape(*q.shape[:-1], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    words = (blocks * (torch.full_like(largest, 32767) / largest)).round()
    return (words * (largest * (1 / 32767))).reshape(q.shape)
