"""The simulated allocator does what the comments and code of torch's say."""

import pytest

from tests.helpers.cuda_allocator import CachingAllocator, OutOfSimulatedMemory

KIB, MIB = 1 << 10, 1 << 20


def reserved(*sizes: int) -> int:
    """Return the bytes reserved for blocks of these sizes."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.malloc(size)
    return allocator.reserved


def test_sizes_share_segments_or_get_their_own() -> None:
    assert reserved(1) == 2 * MIB
    assert reserved(*[32 * KIB] * 64) == 2 * MIB
    assert reserved(*[32 * KIB] * 65) == 4 * MIB
    assert reserved(MIB + 1) == 20 * MIB
    assert reserved(*[5 * MIB] * 4) == 20 * MIB
    assert reserved(*[8 * MIB] * 4) == 40 * MIB
    assert reserved(10 * MIB) == 10 * MIB
    assert reserved(63 * MIB) == 64 * MIB


def test_a_rest_of_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(9 * MIB + 512 * KIB) for _ in range(2)]
    assert [block.size for block in blocks] == [9 * MIB + 512 * KIB, 10 * MIB + 512 * KIB]
    small = CachingAllocator()
    assert [small.malloc(size).size for size in (MIB, 513)] == [MIB, 1024]


def test_the_smallest_free_block_serves() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(64 * MIB), allocator.malloc(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(30 * MIB).address == small.address
    assert allocator.malloc(40 * MIB).address == large.address
    assert allocator.reserved == 96 * MIB


def test_neighbours_that_are_free_become_one() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1, 3):
        allocator.free(blocks[index])
    assert allocator.malloc(20 * MIB).size == 20 * MIB
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_streams_and_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(64 * MIB, stream=1)
    allocator.malloc(64 * MIB, pool="graph")
    assert allocator.reserved == 192 * MIB


def test_a_full_gpu_gives_back_what_is_unused_first() -> None:
    allocator = CachingAllocator(100 * MIB)
    unused, used = allocator.malloc(64 * MIB), allocator.malloc(4 * MIB)
    allocator.free(unused)
    assert allocator.malloc(70 * MIB).size == 70 * MIB
    assert allocator.reserved == 90 * MIB
    allocator.free(used)
    with pytest.raises(OutOfSimulatedMemory):
        allocator.malloc(40 * MIB)
    assert allocator.reserved == 70 * MIB, "freeing its segment did not help"
