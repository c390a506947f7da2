"""Buffers between a GPU and the file, other GPUs and the host: their number and their bytes."""

from __future__ import annotations

LOAD_BUFFERS, LOAD_BUFFER_BYTES = 3, 32 << 20
"""Number and bytes of the staging buffers through which the file's parts reach a GPU, in host
memory and as many on the GPU. One is filled and one is copied while one waits."""

LEAST_FILLS = 16
"""Least number of buffers' contents that a load is divided into: large buffers take long to pin."""

LEAST_BUFFER_BYTES = 1 << 20
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
    return min(LOAD_BUFFER_BYTES, max(LEAST_BUFFER_BYTES, file_bytes // LEAST_FILLS))


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
