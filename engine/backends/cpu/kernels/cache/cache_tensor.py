"""The keys or the values of one layer as kernels address them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.cpu.kernels.cache.cache_codec import CODECS

DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type that holds each type of keys and values."""


class CacheTensor:
    """The keys or the values of one layer, (n_kv, n_slots, head_dim), as kernels address them.

    Attributes:
        n_kv, n_slots, head_dim: numbers of key-value heads, of slots, and of elements of a head.
        address: address of the first element.
        stride, head_stride: bytes from slot to slot and from head to head.
        fits: whether the kernels can read it: on the CPU, in the type's layout, rows contiguous.
    """

    def __init__(self, held: Tensor, kind: str) -> None:
        codec, size = CODECS[kind], held.element_size()
        head_stride, stride, step = held.stride()
        self.n_kv, self.n_slots, width = held.shape
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
