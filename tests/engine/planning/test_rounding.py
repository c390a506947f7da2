"""Bytes that tensors take of a GPU, and of the host's memory for its copies."""

import pytest

from engine.backends.gpu.comm.one_shot import SLOT
from engine.planning.memory import (
    GATHER_BYTES,
    LOAD_BUFFER_BYTES,
    LOAD_BUFFERS,
    ONE_SHOT_SLOT_BYTES,
    allocated_bytes,
    host_link_bytes,
    padding_bytes,
    pinned_bytes,
)
from tests.helpers.cuda_allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "n_bytes",
    [
        *(1, 512, 513, 32 * KIB, 700 * KIB, MIB, MIB + 1, 9 * MIB // 4, 5 * MIB, 8 * MIB),
        *(10 * MIB - 512, 10 * MIB, 37 * MIB // 2, 63 * MIB + 1, 200 * MIB),
    ],
)
def test_many_alike_take_what_is_counted(n_bytes: int) -> None:
    allocator = CachingAllocator()
    n = 2520  # fills segments of 1 to 10
    for _ in range(n):
        allocator.malloc(n_bytes)
    counted = n * allocated_bytes(n_bytes)
    assert counted == pytest.approx(allocator.reserved, rel=1e-3, abs=20 * MIB)
    assert padding_bytes(n_bytes) == allocated_bytes(n_bytes) - n_bytes >= 0


def test_nothing_takes_nothing() -> None:
    assert allocated_bytes(0) == 0


def test_a_slot_of_packets_has_the_bytes_that_are_planned() -> None:
    """Both halves, in whole pages."""
    assert -(-2 * 8 * SLOT // 4096) * 4096 == ONE_SHOT_SLOT_BYTES


def test_pinned_memory_is_that_of_the_load_or_of_exchanges() -> None:
    large, n_vocab = 20 << 30, 128256
    assert pinned_bytes(0, large, n_vocab) == LOAD_BUFFERS * LOAD_BUFFER_BYTES
    assert pinned_bytes(0, 48 * MIB, n_vocab) == LOAD_BUFFERS * 3 * MIB
    two = host_link_bytes(2) + ONE_SHOT_SLOT_BYTES + GATHER_BYTES // 2 + 2 * n_vocab
    assert pinned_bytes(2, MIB, n_vocab) == two
    assert pinned_bytes(2, large, n_vocab) == LOAD_BUFFERS * LOAD_BUFFER_BYTES > two
