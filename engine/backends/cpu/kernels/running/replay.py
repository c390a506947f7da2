"""Replays recorded kernel calls without Python in between."""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I64, VOID, function
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.call_log import CHECKED, MAX_ARGUMENTS, CallLog
from engine.backends.cpu.kernels.running.fastcall import Kernel, bind
from engine.backends.cpu.kernels.running.thread_all_reduce import ADDED, COMPLETE, RESULT
from engine.backends.cpu.kernels.running.thread_pool import WAITED, ThreadPool, now

ARGUMENTS = ("calls", "place", "stop")
"""The kernel's arguments. calls: address of a log's words. place: address of a word index: where to
start and, on return, the call after which the replay stopped. stop: index of the end."""


def build(module: ir.Module) -> None:
    """Emit `replay(pool, *ARGUMENTS)`."""
    code, (pool, calls, place, stop) = function(module, "replay", 1 + len(ARGUMENTS))
    at = code.variable(code.load(place, I64))
    with code.forever() as leave:
        leave(at.get() >= stop)
        here = calls + at.get() * 8
        kernel, count, first = code.load_array(here, 3)
        n = count & (CHECKED - 1)
        begun = now(code)
        for number in range(1, MAX_ARGUMENTS + 1):
            with code.when(n.equals(number)):
                code.call_at(kernel, VOID, *code.load_array(here + 16, number))
        with code.when(count >= CHECKED):
            so_far = pool + WAITED
            code.store(code.load(so_far, I64) + (now(code) - begun), so_far)
            result = code.load(first + RESULT, I64)
            with code.when(result.differs(COMPLETE | ADDED)):
                code.store(at.get(), place)
                code.builder.ret_void()
        at.set(at.get() + n + 2)
    code.store(at.get(), place)
    code.builder.ret_void()


@cache
def _kernel() -> Kernel:
    address = jit.addresses_by_source("replay", chosen(), ["replay"], build)["replay"]
    return bind(address, 1 + len(ARGUMENTS), holds_gil=False)


class KernelReplay:
    """Recorded calls, to be replayed any number of times on the same memory."""

    def __init__(self, log: CallLog, pool: ThreadPool) -> None:
        self._pool = pool
        self._words = log.words
        self._finishes = log.finishes
        self._place = np.zeros(1, np.int64)
        self._addresses = self._words.ctypes.data, self._place.ctypes.data
        self._run = _kernel()

    def run(self, start: int, stop: int) -> None:
        """Replay the calls from word `start` to word `stop`.

        Raises:
            threading.BrokenBarrierError: another rank in an all-reduce has failed.
        """
        calls, place = self._addresses
        self._place[0] = start
        while True:
            self._pool.wake()
            self._run(self._pool.address, calls, place, stop)
            at = int(self._place[0])
            if at >= stop:
                return
            self._finishes[at]()
            self._place[0] = at + 2 + (int(self._words[at + 1]) & (CHECKED - 1))
