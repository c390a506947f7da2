"""Rounding by torch's CUDA allocator: the bytes of a GPU that a tensor really takes.

Sizes and rules are those of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of
PyTorch, by default: a small tensor is cut from a segment of 2 MiB, a middling one from one of
20 MiB, and a large one has a segment of its own, in steps of 2 MiB.
"""

from __future__ import annotations

LEAST_BYTES = 512
"""Bytes to whose multiples every tensor is rounded."""

SMALL_BYTES, SMALL_SEGMENT = 1 << 20, 2 << 20
"""Largest tensor that shares a segment with small ones, and the bytes of that segment."""

LARGE_BYTES, LARGE_SEGMENT = 10 << 20, 20 << 20
"""Least tensor with a segment of its own, and the bytes of one that lesser ones share."""

SEGMENT_STEP = 2 << 20
"""Bytes to whose multiples a segment for one tensor is rounded."""

LARGEST_ARENA = 1 << 30
"""Most bytes of an arena: kernels for AMD reach 2 GiB by cheaper addresses."""


def aligned_bytes(n_bytes: int) -> int:
    """Return the bytes of a tensor up to where the next one may begin."""
    return -(-n_bytes // LEAST_BYTES) * LEAST_BYTES


def is_arena(n_bytes: int) -> bool:
    """Return whether tensors of so many bytes together lie in one piece of a GPU's memory.

    Smaller ones share segments anyway.
    """
    return LARGE_BYTES <= n_bytes <= LARGEST_ARENA


def allocated_bytes(n_bytes: int) -> int:
    """Return the bytes of a GPU that a tensor of `n_bytes` takes beside others of its size.

    In a shared segment that is its part of it, with its part of the rest which fits none of them.
    """
    size = aligned_bytes(n_bytes)
    if size >= LARGE_BYTES:
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP
    if not size:
        return 0
    segment = SMALL_SEGMENT if size <= SMALL_BYTES else LARGE_SEGMENT
    return segment // (segment // size)


def padding_bytes(n_bytes: int) -> int:
    """Return the bytes that a tensor of `n_bytes` takes of a GPU beyond its own."""
    return allocated_bytes(n_bytes) - n_bytes
