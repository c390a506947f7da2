"""Kernel times are added up per pool, by a counter that agrees with Python's clock."""

import time

import pytest
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I64, function
from engine.backends.cpu.kernels.running import fastcall, jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool, tick_s

TURNS = 20_000_000

pytestmark = pytest.mark.skipif(tick_s() is None, reason="no clock is known for this processor")


def _build(module: ir.Module) -> None:
    """Write `wait(pool, turns)`: counts up to `turns`."""
    code, (pool, turns) = function(module, "wait", 2)
    with code.loop(code.number(0), turns):
        pointer = code.builder.inttoptr(pool.raw, I64.as_pointer())
        code.builder.load_atomic(pointer, "seq_cst", 8)  # so that the loop is not optimised away
    code.builder.ret_void()


@pytest.mark.parametrize("holds_gil", [True, False])
def test_kernel_time_is_counted_per_pool(*, holds_gil: bool) -> None:
    address = jit.addresses("test-clock", chosen(), ["wait"], _build)["wait"]
    wait = fastcall.bind(address, 2, holds_gil=holds_gil)
    pool, other = ThreadPool(1), ThreadPool(1)
    assert pool.kernel_s == 0
    begun = time.perf_counter()
    wait(pool.address, TURNS)
    wait(pool.address, TURNS)
    seconds = time.perf_counter() - begun
    time.sleep(seconds)
    assert pool.kernel_s == pytest.approx(seconds, rel=0.1)
    assert other.kernel_s == 0
