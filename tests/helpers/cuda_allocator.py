"""Simulation of torch's caching allocator for one GPU, to know what it reserves without a GPU.

It follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.6 to 2.13,
with their defaults: no expandable segments, no limit on splitting, no garbage collection. Events
of other streams are left out: a block is free as soon as its tensor is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

MIN_BLOCK = 512
"""Bytes to whose multiples all sizes are rounded (kMinBlockSize)."""

SMALL_SIZE = 1 << 20
"""Largest size that is taken from the segments for small ones (kSmallSize)."""

SMALL_SEGMENT = 2 << 20
"""Size of a segment for small sizes (kSmallBuffer)."""

MIN_LARGE = 10 << 20
"""Least size that gets a segment of its own (kMinLargeAlloc)."""

LARGE_SEGMENT = 20 << 20
"""Size of a segment that sizes between share (kLargeBuffer, later large_segment_size)."""

ROUND_LARGE = 2 << 20
"""Bytes to whose multiples segments of one large block are rounded (kRoundLarge)."""


class OutOfSimulatedMemory(Exception):
    """Error of a GPU that is full even without the allocator's unused segments."""


class _PoolKey(NamedTuple):
    """Blocks that may serve one another's requests."""

    pool: object
    stream: object
    is_small: bool


@dataclass(eq=False)
class SegmentBlock:
    """A block: a part of a segment, in use or free."""

    key: _PoolKey
    address: int
    size: int
    before: SegmentBlock | None = None
    behind: SegmentBlock | None = None
    is_free: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """A GPU's allocator.

    Args:
        capacity: bytes of the GPU that are free for segments.

    Attributes:
        reserved: bytes of all segments.
        allocated: bytes of all blocks in use.
        peak: largest value of `reserved` so far.
        segments: bytes of the segments of each pool.
    """

    def __init__(self, capacity: float = float("inf")) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak = 0
        self.segments: Counter[_PoolKey] = Counter()
        self._free: dict[_PoolKey, list[Any]] = defaultdict(list)
        self._next_address = 0

    def malloc(self, n_bytes: int, stream: object = 0, pool: object = None) -> SegmentBlock:
        """Return a block of at least n_bytes.

        Args:
            pool: private pool, such as that of a graph; None for the usual one.

        Raises:
            OutOfSimulatedMemory: the GPU is full.
        """
        size = max(MIN_BLOCK, -(-n_bytes // MIN_BLOCK) * MIN_BLOCK)
        key = _PoolKey(pool, stream, size <= SMALL_SIZE)
        block = self._best_fit(key, size) or self._new_segment(key, size)
        rest = block.size - size
        if rest >= MIN_BLOCK if key.is_small else rest > SMALL_SIZE:
            self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        return block

    def free(self, block: SegmentBlock) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                self._free[other.key].remove((*other.order, other))
                self._join(block, other)
        block.is_free = True
        insort(self._free[block.key], (*block.order, block))

    def empty_cache(self) -> int:
        """Give back all segments without a block in use; return how many bytes they have."""
        freed = 0
        for key, blocks in self._free.items():
            whole = [e for e in blocks if e[2].before is None and e[2].behind is None]
            self.segments[key] -= sum(e[0] for e in whole)
            freed += sum(e[0] for e in whole)
            blocks[:] = [e for e in blocks if e not in whole]
        self.reserved -= freed
        return freed

    def _best_fit(self, key: _PoolKey, size: int) -> SegmentBlock | None:
        blocks = self._free[key]
        at = bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _new_segment(self, key: _PoolKey, size: int) -> SegmentBlock:
        if key.is_small:
            size = SMALL_SEGMENT
        elif size < MIN_LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.reserved + size > self.capacity:
            self.empty_cache()
        if self.reserved + size > self.capacity:
            raise OutOfSimulatedMemory(f"{size} bytes are wanted, {self.reserved} are reserved")
        self.segments[key] += size
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        self._next_address += size
        return SegmentBlock(key, self._next_address - size, size)

    def _split(self, block: SegmentBlock, size: int) -> None:
        rest = SegmentBlock(
            block.key, block.address + size, block.size - size, block, block.behind, is_free=True
        )
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        insort(self._free[rest.key], (*rest.order, rest))

    @staticmethod
    def _join(block: SegmentBlock, other: SegmentBlock) -> None:
        """Make a free neighbour a part of a block."""
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.behind = block
        else:
            block.behind = other.behind
            if block.behind is not None:
                block.behind.before = block
        block.size += other.size
