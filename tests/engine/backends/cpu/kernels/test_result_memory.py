"""Memory of large results is reused, but not while referenced."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.backends.cpu.kernels.running.result_memory import (
    MAX_KEPT,
    MIN_RESULT_BYTES,
    free_blocks,
    result,
)

ROWS = MIN_RESULT_BYTES // 4 // 64


def in_new_thread(test: Callable[[], None]) -> None:
    """Run a test in a new thread, without free blocks."""

    with ThreadPoolExecutor(1) as pool:
        pool.submit(test).result()


def test_freed_memory_is_reused() -> None:
    def test() -> None:
        first = result(2 * ROWS, 64)
        assert first.shape == (2 * ROWS, 64)
        assert first.dtype == torch.float32
        place = first.data_ptr()
        del first
        assert free_blocks().n_bytes == 2 * MIN_RESULT_BYTES
        assert result(ROWS, 2, 64).data_ptr() == place
        smaller = result(ROWS - 1, 64)
        assert smaller.numel() * 4 < MIN_RESULT_BYTES
        assert free_blocks().n_bytes == 2 * MIN_RESULT_BYTES

    in_new_thread(test)


def test_memory_in_use_is_not_lent_twice() -> None:
    def test() -> None:
        first = result(ROWS, 64)
        place, view = first.data_ptr(), first[1:, :3].t()
        view.fill_(7)
        del first
        second = result(ROWS, 64).fill_(1)
        assert bool((view == 7).all())
        assert abs(second.data_ptr() - place) >= MIN_RESULT_BYTES

    in_new_thread(test)


def test_memory_returns_to_the_allocating_thread() -> None:
    def test() -> None:
        held, free = [result(ROWS, 64)], free_blocks()
        other = threading.Thread(target=held.clear)
        other.start()
        other.join()
        assert free.n_bytes == MIN_RESULT_BYTES
        free.clear()
        assert free.n_bytes == 0

    in_new_thread(test)


def test_kept_memory_is_bounded() -> None:
    def test() -> None:
        columns = MAX_KEPT // 4 // 64 // 2
        results = [result(columns + n, 64) for n in range(3)]
        place = results[2].data_ptr()
        del results[2], results[1], results[0]
        assert 0 < free_blocks().n_bytes <= MAX_KEPT
        assert result(columns, 64).data_ptr() != place  # the oldest was dropped

    in_new_thread(test)


def test_much_larger_blocks_are_not_used() -> None:
    def test() -> None:
        place = result(5 * ROWS, 64).data_ptr()
        assert result(ROWS, 64).data_ptr() != place
        assert result(4 * ROWS, 64).data_ptr() == place

    in_new_thread(test)
