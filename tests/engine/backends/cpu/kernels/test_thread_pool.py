"""Every piece of a job runs once, whichever threads are awake; no thread outlives its pool."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I64, VOID, function
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool, add_run

Counts = NDArray[np.int64]
Kernel = Callable[..., None]

LONG = 10.0

COUNTS = ("count", "count_in_shares")


def _build(module: ir.Module) -> None:
    """Write `count(pool, counters, n, n_jobs, busy)`: jobs that add 1 to each of n counters.

    In `count_in_shares`, every other job uses shares.
    """
    add_run(module)
    code, (place, index) = function(module, "add_one", 2)
    counters, busy = code.load_array(place, 2)
    turns = code.variable(code.number(0))
    with code.forever() as leave:
        leave(turns.get() >= busy)
        pointer = code.builder.inttoptr(place.raw, I64.as_pointer())
        code.builder.load_atomic(pointer, "seq_cst", 8)  # so that the loop is not optimised away
        turns.set(turns.get() + 1)
    code.store(code.load(counters + index * 8, I64) + 1, counters + index * 8)
    code.builder.ret_void()
    for name in COUNTS:
        code, (pool, counters, n, n_jobs, busy) = function(module, name, 5)
        kept, task = code.stack_array([counters, busy]), code.function_address("add_one")
        with code.loop(code.number(0), n_jobs) as job:
            is_shared = (job % 2).equals(0 if name == "count_in_shares" else -1)
            with code.if_else(is_shared) as (then, otherwise):
                with then:
                    code.call("run_in_shares", VOID, pool, task, kept, n)
                with otherwise:
                    code.call("run", VOID, pool, task, kept, n)
        code.builder.ret_void()


@pytest.fixture(scope="module", params=COUNTS)
def count(request: pytest.FixtureRequest) -> Kernel:
    found = jit.addresses("test-pool", chosen(), COUNTS, _build)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(found[request.param])


def counted(count: Kernel, pool: ThreadPool, n: int, n_jobs: int = 1, busy: int = 0) -> Counts:
    counters = np.zeros(max(n, 1), np.int64)
    pool.wake()
    count(pool.address, counters.ctypes.data, n, n_jobs, busy)
    return counters[:n]


def helpers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("tandem-worker")}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4, 5])
def test_ten_thousand_jobs_run_each_piece_once(count: Kernel, n_threads: int) -> None:
    pool = ThreadPool(n_threads)
    for n in (1, 2, 5, 23):
        assert (counted(count, pool, n, n_jobs=2500) == 2500).all()
    pool.close()


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_jobs_from_python_run_each_piece_once(count: Kernel, n_threads: int) -> None:
    pool = ThreadPool(n_threads)
    for number in range(1000):
        n = number % 40
        assert (counted(count, pool, n, busy=number % 7 * 50) == 1).all()
    pool.close()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_job_may_have_very_many_pieces(count: Kernel, n_threads: int) -> None:
    pool = ThreadPool(n_threads)
    assert (counted(count, pool, 300_000) == 1).all()
    pool.close()


def test_more_threads_than_cores_make_progress(count: Kernel) -> None:
    pools = [ThreadPool(5) for _ in range(2)]
    results: list[Counts] = []
    callers = [
        threading.Thread(target=lambda t=pool: results.append(counted(count, t, 64, 200, 100)))
        for pool in pools
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert [(result == 200).all() for result in results] == [True, True]
    for pool in pools:
        pool.close()


def test_workers_sleep_and_wake_up(count: Kernel) -> None:
    pool = ThreadPool(3)
    meet = meeting()
    for _ in range(3):
        wait_until(lambda: pool._state.n_asleep == 2)
        assert meet(pool) == [1, 1]
        assert (counted(count, pool, 50, n_jobs=20, busy=20) == 20).all()
    pool.close()


def test_jobs_run_while_all_workers_sleep(count: Kernel) -> None:
    pool = ThreadPool(4)
    wait_until(lambda: pool._state.n_asleep == 3)
    counters = np.zeros(100, np.int64)
    count(pool.address, counters.ctypes.data, 100, 50, 0)  # no wake-up call
    assert (counters == 50).all()
    pool.close()


def _build_meeting(module: ir.Module) -> None:
    """Write `meet(pool, seen)`: two pieces that wait for each other."""
    add_run(module)
    code, (seen, index) = function(module, "hello", 2)
    pointers = [
        code.builder.inttoptr((seen + at * 8).raw, I64.as_pointer())
        for at in (index, code.number(1) - index)
    ]
    code.builder.store_atomic(code.number(1).raw, pointers[0], "seq_cst", 8)
    head, after = (code.builder.function.append_basic_block() for _ in range(2))
    code.builder.branch(head)
    code.builder.position_at_end(head)
    other = code.builder.load_atomic(pointers[1], "seq_cst", 8)
    has_come = code.builder.icmp_signed("==", other, code.number(1).raw)
    code.builder.cbranch(has_come, after, head)
    code.builder.position_at_end(after)
    code.builder.ret_void()
    code, (pool, seen) = function(module, "meet", 2)
    code.call("run", VOID, pool, code.function_address("hello"), seen, code.number(2))
    code.builder.ret_void()


def meeting() -> Callable[[ThreadPool], list[int]]:
    """Compile a job of two pieces that ends only if two threads take part."""
    found = jit.addresses("test-meeting", chosen(), ["meet"], _build_meeting)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(found["meet"])

    def meet(pool: ThreadPool) -> list[int]:
        seen = np.zeros(2, np.int64)
        pool.wake()
        kernel(pool.address, seen.ctypes.data)
        return [int(number) for number in seen]

    return meet


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_a_closed_pool_leaves_no_thread(count: Kernel, n_threads: int) -> None:
    before = helpers()
    pool = ThreadPool(n_threads)
    assert len(helpers() - before) == n_threads - 1
    counted(count, pool, 10)
    pool.close()
    pool.close()
    assert helpers() <= before


def test_a_pool_may_be_closed_while_its_workers_sleep() -> None:
    before = helpers()
    pool = ThreadPool(4)
    wait_until(lambda: pool._state.n_asleep == 3)
    pool.close()
    assert helpers() <= before


def test_a_garbage_collected_pool_leaves_no_thread(count: Kernel) -> None:
    before = helpers()
    pool = ThreadPool(4)
    counted(count, pool, 10)
    del pool
    gc.collect()
    wait_until(lambda: helpers() <= before)


def test_pools_may_be_created_and_closed_concurrently(count: Kernel) -> None:
    before = helpers()
    for _ in range(50):
        pool = ThreadPool(3)
        assert (counted(count, pool, 7) == 1).all()
        pool.close()
    assert helpers() <= before


def test_python_runs_during_kernels(count: Kernel) -> None:
    pool = ThreadPool(2)
    worker = threading.Thread(target=counted, args=(count, pool, 64, 20, 200_000))
    worker.start()
    turns = 0
    while worker.is_alive() and turns < 10:
        turns += 1
        time.sleep(0.001)
    worker.join()
    assert turns > 3
    pool.close()


@pytest.mark.skipif(sys.platform == "win32", reason="counts processor time as POSIX does")
def test_an_idle_pool_uses_no_cpu_time(count: Kernel) -> None:
    pool = ThreadPool(3)
    counted(count, pool, 10)
    wait_until(lambda: pool._state.n_asleep == 2)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1
    pool.close()
