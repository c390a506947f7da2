"""Memory by purpose: what a device is predicted to hold, and what it really holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device by purpose.

    Attributes:
        weights: bytes of the weights.
        kv: bytes of the KV cache and of recurrent states on the device itself.
        compute: bytes of working memory.
        host_kv: bytes of keys and values that lie in the host's memory instead; not in `total`.
        padding: bytes that torch's allocator adds to weights and cache on a GPU by rounding.
        pinned: bytes of the host's memory for copies from and to a GPU; not in `total`.
        draft: bytes of the draft model, which lies whole on one rank's device.
        pictures: bytes of the encoder of pictures, likewise, and of its work on the largest one.
    """

    weights: int = 0
    kv: int = 0
    compute: int = 0
    host_kv: int = 0
    padding: int = 0
    pinned: int = 0
    draft: int = 0
    pictures: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device itself."""
        beside = self.draft + self.pictures
        return self.weights + self.kv + self.compute + self.padding + beside

    @property
    def on_host(self) -> int:
        """Bytes in the host's memory for a GPU."""
        return self.host_kv + self.pinned


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Predicted and measured bytes of one rank.

    Attributes:
        device: name of its device, such as "cuda:0".
    """

    device: str
    predicted: MemoryUse
    measured: MemoryUse


MIN_BYTES = 512
"""Bytes to whose multiples every tensor is rounded."""

SMALL_BYTES, SMALL_SEGMENT = 1 << 20, 2 << 20
"""Largest tensor that shares a segment with small ones, and the bytes of that segment."""

LARGE_BYTES, LARGE_SEGMENT = 10 << 20, 20 << 20
"""Least tensor with a segment of its own, and the bytes of one that lesser ones share."""

SEGMENT_STEP = 2 << 20
"""Bytes to whose multiples a segment for one tensor is rounded."""

MAX_ARENA = 1 << 30
"""Most bytes of an arena: kernels for AMD reach 2 GiB by cheaper addresses."""


def aligned_bytes(n_bytes: int) -> int:
    """Return the bytes of a tensor up to where the next one may begin."""
    return -(-n_bytes // MIN_BYTES) * MIN_BYTES


def is_arena(n_bytes: int) -> bool:
    """Return whether tensors of so many bytes together lie in one piece of a GPU's memory.

    Smaller ones share segments anyway.
    """
    return LARGE_BYTES <= n_bytes <= MAX_ARENA


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


LOAD_BUFFERS, LOAD_BUFFER_BYTES = 3, 32 << 20
"""Number and bytes of the staging buffers through which the file's parts reach a GPU, in host
memory and as many on the GPU. One is filled and one is copied while one waits."""

MIN_FILLS = 16
"""Least number of buffers' contents that a load is divided into: large buffers take long to pin."""

MIN_BUFFER_BYTES = 1 << 20
"""Least size of a staging buffer, in bytes."""

PACK_BYTES = 64 << 20
"""Bytes of GPU memory needed to turn blocks of the file into planes."""

LOADING_BYTES = LOAD_BUFFERS * LOAD_BUFFER_BYTES + PACK_BYTES
"""Most bytes that a GPU takes beside its weights while these are loaded; freed afterwards."""

LINK_ROUND_BYTES = 4 << 20
"""Bytes of a large value that ranks on GPUs exchange at a time; see `gpu.comm.copies`."""

ONE_SHOT_SLOT_BYTES = 516 << 10
"""Bytes of the packets from one other rank, in two halves used in turn; see
`engine.backends.gpu.comm.one_shot`."""

LINK_SETS = 2
"""Number of exchange buffers, used in turn: one is filled while the other is read."""

GATHER_BYTES = 16 << 20
"""Most bytes of pinned memory for logits: more rows are gathered in several turns."""

PAGE_BYTES = 2 << 20
"""Bytes to whose multiples the driver rounds what it allocates on a GPU, small things together."""


def staging_bytes(file_bytes: int) -> int:
    """Return the bytes of one staging buffer for a rank that reads so much of the file."""
    return min(LOAD_BUFFER_BYTES, max(MIN_BUFFER_BYTES, file_bytes // MIN_FILLS))


def shown_bytes(stage: int, n_ranks: int) -> int:
    """Return the bytes that one of n ranks shows the others in a stage of an all-reduce by copies.

    Stage 0 shows a part of the rank's value, stage 1 the sum of its slice.
    """
    return LINK_ROUND_BYTES if stage == 0 else -(-LINK_ROUND_BYTES // n_ranks // 16) * 16


def link_bytes(n_ranks: int) -> int:
    """Return the bytes that all-reduces of n ranks take on each GPU, of large and small values."""
    slots = max(0, n_ranks - 1) * ONE_SHOT_SLOT_BYTES
    return copying_bytes(n_ranks) + -(-slots // PAGE_BYTES) * PAGE_BYTES


def copying_bytes(n_ranks: int) -> int:
    """Return the bytes that all-reduces by copies, for large values, take on each GPU.

    Where values pass by host memory, the pinned part there is smaller: `host_link_bytes`.
    """
    if n_ranks < 2:
        return 0
    stages = range(1 if n_ranks == 2 else 2)
    total = 2 * shown_bytes(1, n_ranks) if n_ranks > 2 else 0
    return total + LINK_SETS * sum(shown_bytes(k, n_ranks) + LINK_ROUND_BYTES for k in stages)


def host_link_bytes(n_ranks: int) -> int:
    """Return the host bytes that all-reduces by copies take for each rank that exchanges there."""
    if n_ranks < 2:
        return 0
    stages = range(1 if n_ranks == 2 else 2)
    return LINK_SETS * sum(shown_bytes(stage, n_ranks) for stage in stages)


def pinned_bytes(n_ranks: int, file_bytes: int, n_vocab: int) -> int:
    """Return the pinned bytes of host memory for one GPU: those of the load, or of exchanges.

    They are counted as if GPUs did not reach each other's memory: before a load, nobody knows.

    Args:
        n_ranks: number of ranks that exchange values on their devices.
        file_bytes: bytes of the file that the rank reads.
        n_vocab: number of logits of a row; the ranks share the memory that gathers them.
    """
    on_load = LOAD_BUFFERS * staging_bytes(file_bytes)
    if n_ranks < 2:
        return on_load
    slots = (n_ranks - 1) * ONE_SHOT_SLOT_BYTES
    gathered = -(-(GATHER_BYTES + 4 * n_vocab) // n_ranks)
    return max(on_load, host_link_bytes(n_ranks) + slots + gathered)
