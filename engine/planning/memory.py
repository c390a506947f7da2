"""Memory by purpose, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device by purpose.

    Attributes:
        kv: bytes of the KV cache and recurrent states on the device itself.
        host_kv: bytes of keys and values that are in host memory instead; not in `total`.
        padding: bytes that torch's allocator adds to weights and cache on a GPU by rounding up.
        pinned: bytes of host memory for copies to and from a GPU; not in `total`.
        draft: bytes of the draft model, which is entirely on one rank's device.
        pictures: bytes of the vision encoder, also on a single device, and of its largest image.
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
        others = self.draft + self.pictures
        return self.weights + self.kv + self.compute + self.padding + others

    @property
    def on_host(self) -> int:
        """Bytes used in host memory on behalf of a GPU."""
        return self.host_kv + self.pinned


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Predicted and measured bytes for one rank on a device such as "cuda:0"."""

    device: str
    predicted: MemoryUse
    measured: MemoryUse


MIN_BYTES = 512
"""Tensor sizes are rounded up to a multiple of this."""

SMALL_BYTES, SMALL_SEGMENT = 1 << 20, 2 << 20
"""Largest tensor put into a shared segment for small tensors, and the size of that segment."""

LARGE_BYTES, LARGE_SEGMENT = 10 << 20, 20 << 20
"""Smallest tensor with a separate segment, and the size of a segment that smaller ones share."""

SEGMENT_STEP = 2 << 20
"""A segment for one tensor is rounded up to a multiple of this."""

MAX_ARENA = 1 << 30
"""Largest arena: kernels for AMD address up to 2 GiB more cheaply."""


def aligned_bytes(n_bytes: int) -> int:
    """Return a tensor's size, rounded up to where the next tensor may begin."""
    return -(-n_bytes // MIN_BYTES) * MIN_BYTES


def is_arena(n_bytes: int) -> bool:
    """Return whether tensors of this total size share one allocation on a GPU."""
    return LARGE_BYTES <= n_bytes <= MAX_ARENA


def allocated_bytes(n_bytes: int) -> int:
    """Return the bytes that a tensor of `n_bytes` takes on a GPU among others of its size.

    In a shared segment, that is a fraction of the segment, including the unusable remainder.
    """
    size = aligned_bytes(n_bytes)
    if size >= LARGE_BYTES:
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP
    if not size:
        return 0
    segment = SMALL_SEGMENT if size <= SMALL_BYTES else LARGE_SEGMENT
    return segment // (segment // size)


def padding_bytes(n_bytes: int) -> int:
    """Return the bytes that a tensor of `n_bytes` takes on a GPU in addition to its size."""
    return allocated_bytes(n_bytes) - n_bytes


LOAD_BUFFERS, LOAD_BUFFER_BYTES = 3, 32 << 20
"""Number and size of the staging buffers for loading, in host memory and on the GPU: one is filled
and one is copied while one waits."""

MIN_FILLS = 16
"""Minimum number of fills that loading is divided into; large buffers take long to pin."""

MIN_BUFFER_BYTES = 1 << 20

PACK_BYTES = 64 << 20
"""Bytes of GPU memory needed to repack blocks from the file into planes."""

LOADING_BYTES = LOAD_BUFFERS * LOAD_BUFFER_BYTES + PACK_BYTES
"""Maximum temporary memory for loading on a GPU."""

LINK_ROUND_BYTES = 4 << 20
"""Size of the chunks in which GPUs exchange a large value; see `gpu.comm.copies`."""

ONE_SHOT_SLOT_BYTES = 516 << 10
"""Size of the packets from one peer, in two halves used in turn; see
`engine.backends.gpu.comm.one_shot`."""

LINK_SETS = 2
"""Number of exchange buffers, used in turn: one is filled while the other is read."""

GATHER_BYTES = 16 << 20
"""Maximum pinned memory for logits; if there are more rows, they are gathered in several rounds."""

PAGE_BYTES = 2 << 20
"""The driver rounds allocations on a GPU up to a multiple of this."""


def staging_bytes(file_bytes: int) -> int:
    """Return the size of a staging buffer for a rank that reads `file_bytes` from the file."""
    return min(LOAD_BUFFER_BYTES, max(MIN_BUFFER_BYTES, file_bytes // MIN_FILLS))


def shown_bytes(stage: int, n_ranks: int) -> int:
    """Return the bytes that each of n ranks exposes to its peers in a stage of an all-reduce.

    Stage 0 exposes a part of the rank's value, stage 1 the sum of the rank's slice.
    """
    return LINK_ROUND_BYTES if stage == 0 else -(-LINK_ROUND_BYTES // n_ranks // 16) * 16


def link_bytes(n_ranks: int) -> int:
    """Return the bytes that n ranks' all-reduces take on each GPU, for large and small values."""
    slots = max(0, n_ranks - 1) * ONE_SHOT_SLOT_BYTES
    return copying_bytes(n_ranks) + -(-slots // PAGE_BYTES) * PAGE_BYTES


def copying_bytes(n_ranks: int) -> int:
    """Return the bytes that all-reduces with copies, for large values, take on each GPU.

    Without peer access, the part pinned in host memory is smaller; see `host_link_bytes`.
    """
    if n_ranks < 2:
        return 0
    stages = range(1 if n_ranks == 2 else 2)
    total = 2 * shown_bytes(1, n_ranks) if n_ranks > 2 else 0
    return total + LINK_SETS * sum(shown_bytes(k, n_ranks) + LINK_ROUND_BYTES for k in stages)


def host_link_bytes(n_ranks: int) -> int:
    """Return the host bytes per rank for all-reduces with copies if there is no peer access."""
    if n_ranks < 2:
        return 0
    stages = range(1 if n_ranks == 2 else 2)
    return LINK_SETS * sum(shown_bytes(stage, n_ranks) for stage in stages)


def pinned_bytes(n_ranks: int, file_bytes: int, n_vocab: int) -> int:
    """Return the pinned host bytes for one GPU: those for loading or exchanges, whichever are more.

    Peer access is unknown before loading, so exchanges are counted as if there were none.

    Args:
        n_ranks: number of ranks that exchange values on their devices.
        n_vocab: logits per row; the ranks share the memory that gathers them.
    """
    on_load = LOAD_BUFFERS * staging_bytes(file_bytes)
    if n_ranks < 2:
        return on_load
    slots = (n_ranks - 1) * ONE_SHOT_SLOT_BYTES
    gathered = -(-(GATHER_BYTES + 4 * n_vocab) // n_ranks)
    return max(on_load, host_link_bytes(n_ranks) + slots + gathered)
