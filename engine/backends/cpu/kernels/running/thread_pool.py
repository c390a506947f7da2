"""A thread pool that runs the pieces of kernels; its threads spin during a pass and then sleep.

A kernel's work is a function `task(arguments, index)`, called once for every index below `n`; each
call is a piece. The calling thread works too, and each thread takes the next piece when it is free,
so a thread that the system suspends delays only its own piece. Either all threads take pieces from
the front (`run`), or each has a share of adjacent pieces and then helps others (`run_in_shares`).
Shares suit memory that is read in piece order: a thread reads it fastest from front to back,
because prefetching continues from one piece to the next.

One 64-bit word describes the job: its number of pieces, whether there are shares, and, in the upper
bits, the number of jobs so far. Each share has a word with the same upper bits and the number of
pieces that it has left; a word with different upper bits belongs to an earlier job, which means
that none of the current job's pieces has been taken. A thread takes a piece by compare-and-swap of
that word, which fails if another thread or job came first. So if it succeeds, everything that the
thread has read about the job is valid.

Threads spin (for a bounded time) because waking one takes longer than a small kernel.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import (
    I32,
    I64,
    VOID,
    Code,
    Value,
    Variable,
    function,
    internal,
)
from engine.backends.cpu.kernels.running import jit

CALIBRATION_S = 0.01
"""Time spent measuring the length of a tick, in seconds."""


def now(code: Code) -> Value:
    """Emit a read of the timestamp counter, in ticks; 0 on processors without a known counter."""
    family = code.builder.module.triple.split("-")[0]
    if family in ("x86_64", "amd64"):
        return code.call("llvm.readcyclecounter", I64)  # ticks at a constant rate
    if family in ("aarch64", "arm64"):  # the intrinsic may read a forbidden counter
        return _register(code, "cntvct_el0")
    return code.number(0)


def _register(code: Code, name: str) -> Value:
    module, intrinsic = code.builder.module, "llvm.read_volatile_register.i64"
    kind = ir.FunctionType(I64, [ir.MetaDataType()])
    read = module.globals.get(intrinsic) or ir.Function(module, kind, intrinsic)
    named = module.add_metadata([ir.MetaDataString(module, name)])
    return Value(code, code.builder.call(read, [named]))


@cache
def tick_s() -> float | None:
    """Return the length of a tick in seconds, measured once; None if there is no counter."""
    address = jit.addresses_by_source("clock", chosen(), ["read"], build)["read"]
    read = ctypes.CFUNCTYPE(ctypes.c_int64)(address)
    begun, first = time.perf_counter(), read()
    time.sleep(CALIBRATION_S)
    seconds, ticks = time.perf_counter() - begun, read() - first
    return seconds / ticks if ticks else None


def build(module: ir.Module) -> None:
    """Emit `read()`: returns the counter, in ticks."""
    code, _ = function(module, "read", 0, I64)
    code.builder.ret(now(code).raw)


JOIN_S = 5.0
"""Timeout for joining a worker thread, in seconds."""

LEFT_BITS = 24
"""Number of a word's bits that count pieces."""

MAX_PIECES = (1 << LEFT_BITS) - 1
"""Largest number of pieces in a job."""

IN_SHARES = 1 << LEFT_BITS
"""Bit in the job's word that is set if each thread has a share."""

ONE_JOB = 2 * IN_SHARES
"""Increment of the job's word per job."""

WORD, TASK, ARGUMENTS, THREADS, YIELD = 0, 64, 72, 80, 88
TICKS, REST, LOG, WAITED, DONE, SHARES = 96, 104, 112, 120, 128, 192
"""Byte offsets in a pool's memory; words written by several threads are in separate cache lines.

`WORD`, `TASK` and `ARGUMENTS` describe the job (see above); `DONE` counts its finished pieces; the
shares' words start at `SHARES`. `THREADS`: number of threads. `YIELD`: address of the system's
function that yields the core. `TICKS`: total kernel time, in ticks; `WAITED`: the part of it spent
waiting for other ranks. `REST`: 1 if workers must not spin. `LOG`: address of the log of
kernel calls, or 0.
"""

SHARE_BYTES = 64
"""Distance in bytes between the words of two shares."""

SPIN_TURNS = 60_000
"""Number of spins before an idle worker sleeps: one or two milliseconds, longer than ranks spin for
one another, so that the first rank to continue finds its workers awake."""

YIELD_TURNS = 2_000
"""Number of spins before yielding the core."""


def memory_bytes(n_threads: int) -> int:
    """Return the size of a pool's memory, which is aligned to 64 bytes."""
    return SHARES + SHARE_BYTES * n_threads


def add_run(module: ir.Module) -> None:
    """Emit `run` and `run_in_shares(pool, task, arguments, n)` for 0 to `MAX_PIECES` pieces."""
    _add_take_pieces(module)
    for name, bit in (("run", 0), ("run_in_shares", IN_SHARES)):
        code, (pool, task, arguments, n) = function(module, name, 4)
        last = load(code, pool + WORD)
        store(code, task, pool + TASK)
        store(code, arguments, pool + ARGUMENTS)
        store(code, code.number(0), pool + DONE)
        word = (last & -ONE_JOB) + ONE_JOB + bit + n
        store(code, word, pool + WORD)
        code.call("take_pieces", I64, pool, word, code.number(0))
        waited = code.variable(code.number(0))
        with code.forever() as leave:
            leave(load(code, pool + DONE) >= n)
            pause(code, pool, waited)
        code.builder.ret_void()


def _build_work_loop(module: ir.Module) -> None:
    """Emit `work_loop(pool, number, turns)`: a worker's loop; workers are numbered from 1.

    It ends after `turns` spins in which no piece was found, or immediately if the pool is resting.
    """
    _add_take_pieces(module)
    code, (pool, number, turns) = function(module, "work_loop", 3)
    idle, seen = (code.variable(code.number(0)) for _ in range(2))
    with code.forever() as leave:
        did, word = code.variable(code.number(0)), load(code, pool + WORD)
        with code.when(word.differs(seen.get())):
            did.set(code.call("take_pieces", I64, pool, word, number))
            seen.set(word)
        with code.when(did.get() > 0):
            idle.set(code.number(0))
        leave(idle.get() > turns)
        leave(did.get().equals(0) & (load(code, pool + REST) > 0))
        pause(code, pool, idle)
    code.builder.ret_void()


def _add_take_pieces(module: ir.Module) -> None:
    """Emit `take_pieces(pool, word, number)`: runs remaining pieces; returns how many it ran.

    `word` is the job's word, `number` the thread's index.
    """
    _add_take_share(module)
    code, (pool, word, number) = internal(module, "take_pieces", 3, I64)
    n, has_shares = word & MAX_PIECES, (word & IN_SHARES) > 0
    n_share = code.where(has_shares, load(code, pool + THREADS), code.number(1))
    did = code.variable(code.number(0))
    with code.loop(code.number(0), n_share) as turn:
        share = (number + turn) % n_share
        first, end = share * n // n_share, (share + 1) * n // n_share
        done = code.call("take_share", I64, pool, word, share, first, end)
        did.set(did.get() + done)
    code.builder.ret(did.get().raw)


def _add_take_share(module: ir.Module) -> None:
    """Emit `take_share(pool, word, share, first, end)`: runs a share's remaining pieces.

    The share's pieces are `first` to `end` - 1. The function returns how many it ran.
    """
    code, (pool, word, share, first, end) = internal(module, "take_share", 5, I64)
    task, arguments = (load(code, pool + at) for at in (TASK, ARGUMENTS))
    address, job = pool + SHARES + share * SHARE_BYTES, word & -IN_SHARES
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    did = code.variable(code.number(0))
    with code.forever() as leave:
        before = load(code, address)
        is_begun = (before & -IN_SHARES).equals(job)
        left = code.where(is_begun, before & MAX_PIECES, end - first)
        # read after `before`, so that `before` cannot belong to a later job
        leave(left.equals(0) | load(code, pool + WORD).differs(word))
        after = job + left - 1
        taken = code.builder.cmpxchg(place, before.raw, after.raw, "seq_cst", "seq_cst")
        with code.when(Value(code, code.builder.extract_value(taken, 1))):
            code.call_at(task, VOID, arguments, end - left)
            did.set(did.get() + 1)
    with code.when(did.get() > 0):
        done = code.builder.inttoptr((pool + DONE).raw, I64.as_pointer())
        code.builder.atomic_rmw("add", done, did.get().raw, "seq_cst")
    code.builder.ret(did.get().raw)


def load(code: Code, address: Value) -> Value:
    """Load a 64-bit integer that several threads write; sequentially consistent."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    return Value(code, code.builder.load_atomic(place, "seq_cst", 8))


def store(code: Code, number: Value, address: Value) -> None:
    """Store a 64-bit integer that several threads read; sequentially consistent."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    code.builder.store_atomic(number.raw, place, "seq_cst", 8)


def pause(code: Code, pool: Value, waited: Variable, yield_turns: int = YIELD_TURNS) -> None:
    """Emit one spin: a pause instruction and, every `yield_turns` spins, a yield of the core.

    Args:
        pool: address of memory that has the system's yield function at `YIELD`.
        waited: number of spins so far, which this increments.
    """
    waited.set(waited.get() + 1)
    family = code.builder.module.triple.split("-")[0]
    if family in ("x86_64", "amd64"):
        code.call("llvm.x86.sse2.pause", VOID)
    elif family in ("aarch64", "arm64"):  # YIELD is mostly a no-op; ISB waits like `pause`
        code.call("llvm.aarch64.isb", VOID, code.constant(I32, 15))
    with code.when((waited.get() % yield_turns).equals(0)):
        code.call_at(code.load(pool + YIELD, I64), I32)


@cache
def _work_loop() -> Callable[[int, int, int], None]:
    address = jit.addresses_by_source("pool", chosen(), ["work_loop"], _build_work_loop)[
        "work_loop"
    ]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)


def yield_address() -> int:
    """Return the address of the system's function that yields the core."""
    if sys.platform == "win32":
        library, name = ctypes.WinDLL("kernel32"), "SwitchToThread"
    else:
        library, name = ctypes.CDLL(None), "sched_yield"
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class _State:
    """State for putting workers to sleep and waking them.

    Workers refer to this, not to the pool, so that they stop when the pool is garbage-collected.

    Attributes:
        n_asleep: number of sleeping workers.
        n_calls: number of wake-up calls so far.
        is_closed: whether the workers must stop.
    """

    def __init__(self) -> None:
        self.n_asleep = 0
        self.n_calls = 0
        self.is_closed = False
        self._condition = threading.Condition()

    def sleep(self, n_calls: int) -> None:
        """Sleep until the next wake-up call; return immediately if one followed `n_calls`."""
        with self._condition:
            self.n_asleep += 1
            if self.n_calls == n_calls:
                self._condition.wait()
            self.n_asleep -= 1

    def wake(self) -> None:
        """Wake all workers.

        A worker about to sleep either has counted itself or sees the new call, so none is missed.
        """
        self.n_calls += 1
        if self.n_asleep:
            with self._condition:
                self._condition.notify_all()

    def close(self) -> None:
        self.is_closed = True
        self.wake()


def _work(state: _State, memory: object, address: int, number: int) -> None:
    """Run a worker; it keeps alive `memory`, which contains the pool's `address`."""
    take_part = _work_loop()
    while True:
        n_calls = state.n_calls  # read first: closing counts as a call
        if state.is_closed:
            return
        take_part(address, number, SPIN_TURNS)
        state.sleep(n_calls)


class ThreadPool:
    """The calling thread and `n_threads - 1` workers, which together run the pieces of kernels.

    Only one thread at a time may call kernels with a pool.

    Attributes:
        address: address of the pool's memory, the first argument of each kernel.
        n_threads: number of threads, including the calling one.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._memory = np.zeros(memory_bytes(n_threads) + 64, np.uint8)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        ctypes.c_int64.from_address(self.address + YIELD).value = yield_address()
        ctypes.c_int64.from_address(self.address + THREADS).value = n_threads
        self._is_resting = False
        self._state = state = _State()
        self._finalizer = weakref.finalize(self, state.close)
        self._threads = [
            threading.Thread(
                target=_work,
                args=(state, self._memory, self.address, number),
                name=f"tandem-worker-{number}",
                daemon=True,
            )
            for number in range(1, n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kernel_s(self) -> float | None:
        """Total kernel time in seconds; None if there is no timestamp counter."""
        length = tick_s()
        return length and length * (self._word(TICKS) - self._word(WAITED))

    @property
    def waited_s(self) -> float | None:
        """Seconds that replays have waited for other ranks; None if there is no counter."""
        length = tick_s()
        return length and length * self._word(WAITED)

    def _word(self, offset: int) -> int:
        return ctypes.c_int64.from_address(self.address + offset).value

    def log_calls(self, log: int) -> None:
        """Record kernel calls in the log at an address; an address of 0 stops recording."""
        ctypes.c_int64.from_address(self.address + LOG).value = log

    def wake(self) -> None:
        """Wake sleeping workers; must be called before each kernel that uses them."""
        if self._is_resting:
            self._rest(wanted=False)
        self._state.wake()

    def rest(self) -> None:
        """Stop the workers from spinning, as other threads (such as torch's) need the cores."""
        if not self._is_resting:
            self._rest(wanted=True)

    def _rest(self, *, wanted: bool) -> None:
        self._is_resting = wanted
        ctypes.c_int64.from_address(self.address + REST).value = wanted

    def close(self) -> None:
        """Stop and join the workers; safe to call twice."""
        self.rest()
        self._finalizer()
        for thread in self._threads:
            thread.join(JOIN_S)
