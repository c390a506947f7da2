"""A team of threads that share the pieces of kernels: they spin during a pass and sleep between.

A kernel's work is a function `task(arguments, index)`, called once for every index below `n`: its
pieces. The calling thread works too, and each thread takes the next piece when it is free, so that
a thread which the system suspends delays its own piece alone. One 64-bit word holds the number of
pieces of the present job that nobody has taken yet, and, in its upper half, the number of jobs so
far. A thread takes a piece by compare-and-swap of that word, which fails if another thread or job
came first; so where it succeeds, all that the thread has read about the job is still right.

Threads spin because waking one takes longer than a small kernel. They spin for a bounded time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir

from engine.cpu.kernels import jit
from engine.cpu.kernels.isa import chosen
from engine.cpu.kernels.timestamp_counter import tick_s
from engine.cpu.kernels.values import I32, I64, VOID, Code, Value, Variable, function

JOIN_S = 5.0
"""Longest time to wait for the end of a worker thread, in seconds."""

LEFT_BITS = 32
"""Bits of the word that count the pieces left."""

MAX_PIECES = (1 << (LEFT_BITS - 1)) - 1
"""Largest number of pieces of a job."""

WORD, TASK, ARGUMENTS, PIECES, YIELD = 0, 64, 72, 80, 88
TICKS, REST, LOG, WAITED, DONE, SIZE = 96, 104, 112, 120, 128, 192
"""Byte offsets in a team's memory; words that several threads write have cache lines of their own.

`WORD` is described above; `TASK`, `ARGUMENTS` and `PIECES` describe the present job, and `DONE`
counts its finished pieces. `YIELD`: address of the system's function that yields the core. `TICKS`:
time that kernels have taken, in ticks (`cpu.kernels.timestamp_counter`); `WAITED`: how much of it
was waiting for other ranks. `REST`: 1 where workers shall not spin. `LOG`: address of the log that
calls of kernels are recorded in, or 0."""

SPIN_TURNS = 60_000
"""Turns that an idle worker spins before it sleeps: one or two milliseconds. That is longer than
ranks spin for each other, so that the first rank to go on finds its workers awake."""

YIELD_TURNS = 2_000
"""Turns of spinning after which the system may run another thread on the core."""


def add_run(module: ir.Module) -> None:
    """Write `run(team, task, arguments, n)`: does a job of 0 to `MAX_PIECES` pieces."""
    _add_take_piece(module)
    code, (team, task, arguments, n) = function(module, "run", 4)
    word = load(code, team + WORD)
    store(code, task, team + TASK)
    store(code, arguments, team + ARGUMENTS)
    store(code, n, team + PIECES)
    store(code, code.number(0), team + DONE)
    job = (word >> LEFT_BITS) + 1
    store(code, (job << LEFT_BITS) | n, team + WORD)
    with code.forever() as leave:
        leave(code.call("take_piece", I64, team).equals(0))
    waited = code.variable(code.number(0))
    with code.forever() as leave:
        leave(load(code, team + DONE) >= n)
        pause(code, team, waited)
    code.builder.ret_void()


def _build_work_loop(module: ir.Module) -> None:
    """Write `work_loop(team, turns)`: a worker's loop, until there was no job for so many turns.

    It ends at once where there is no piece to take and the team shall rest.
    """
    _add_take_piece(module)
    code, (team, turns) = function(module, "work_loop", 2)
    idle = code.variable(code.number(0))
    with code.forever() as leave:
        did = code.call("take_piece", I64, team)
        with code.when(did > 0):
            idle.set(code.number(0))
        leave(idle.get() > turns)
        leave(did.equals(0) & (load(code, team + REST) > 0))
        pause(code, team, idle)
    code.builder.ret_void()


def _add_take_piece(module: ir.Module) -> None:
    """Write `take_piece(team)`: does a piece of the present job; returns 1, 0 if none is left."""
    code, (team,) = function(module, "take_piece", 1, I64)
    code.builder.function.linkage = "internal"
    word = load(code, team + WORD)
    left = word & MAX_PIECES
    with code.when(left.equals(0)):
        code.builder.ret(code.number(0).raw)
    task, arguments, n = (load(code, team + at) for at in (TASK, ARGUMENTS, PIECES))
    index = n - left
    place = code.builder.inttoptr((team + WORD).raw, I64.as_pointer())
    taken = code.builder.cmpxchg(place, word.raw, (word - 1).raw, "seq_cst", "seq_cst")
    with code.when(Value(code, code.builder.extract_value(taken, 1))):
        code.call_at(task, VOID, arguments, index)
        done = code.builder.inttoptr((team + DONE).raw, I64.as_pointer())
        code.builder.atomic_rmw("add", done, code.number(1).raw, "seq_cst")
    code.builder.ret(code.number(1).raw)


def load(code: Code, address: Value) -> Value:
    """Load a 64-bit integer that several threads write (sequentially consistent)."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    return Value(code, code.builder.load_atomic(place, "seq_cst", 8))


def store(code: Code, number: Value, address: Value) -> None:
    """Store a 64-bit integer that several threads read (sequentially consistent)."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    code.builder.store_atomic(number.raw, place, "seq_cst", 8)


def pause(code: Code, team: Value, waited: Variable, yield_turns: int = YIELD_TURNS) -> None:
    """Write one turn of a spin loop: a pause instruction, and now and then a yield of the core.

    Args:
        team: address of a memory that has the system's function at `YIELD`.
        waited: number of turns so far; counted up here.
        yield_turns: number of turns after which the core is yielded.
    """
    waited.set(waited.get() + 1)
    family = code.builder.module.triple.split("-")[0]
    if family in ("x86_64", "amd64"):
        code.call("llvm.x86.sse2.pause", VOID)
    elif family in ("aarch64", "arm64"):  # YIELD does nothing on most; ISB takes about as long
        code.call("llvm.aarch64.isb", VOID, code.constant(I32, 15))
    with code.when((waited.get() % yield_turns).equals(0)):
        code.call_at(code.load(team + YIELD, I64), I32)


@cache
def _work_loop() -> Callable[[int, int], None]:
    """Compile the worker's loop."""
    address = jit.addresses_by_source("team", chosen(), ["work_loop"], _build_work_loop)[
        "work_loop"
    ]
    return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)


def yield_address() -> int:
    """Return the address of the system's function that lets another thread run."""
    if sys.platform == "win32":
        library, name = ctypes.WinDLL("kernel32"), "SwitchToThread"
    else:
        library, name = ctypes.CDLL(None), "sched_yield"
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class _State:
    """Sleep and wake-up of the workers.

    Workers hold this and not the team, so that a team nobody holds is freed and ends them.

    Attributes:
        n_asleep: number of workers that sleep.
        n_calls: number of wake-up calls so far.
        is_closed: whether the workers shall end.
    """

    def __init__(self) -> None:
        self.n_asleep = 0
        self.n_calls = 0
        self.is_closed = False
        self._condition = threading.Condition()

    def sleep(self, n_calls: int) -> None:
        """Sleep until the next wake-up call; return at once if there were more than `n_calls`."""
        with self._condition:
            self.n_asleep += 1
            if self.n_calls == n_calls:
                self._condition.wait()
            self.n_asleep -= 1

    def wake(self) -> None:
        """Wake all workers.

        A worker about to sleep has either counted itself or sees the new call, so none is missed.
        """
        self.n_calls += 1
        if self.n_asleep:
            with self._condition:
                self._condition.notify_all()

    def close(self) -> None:
        """Have the workers end."""
        self.is_closed = True
        self.wake()


def _work(state: _State, memory: object, address: int) -> None:
    """Run a worker thread; it holds `memory`, in which the team's address lies."""
    take_part = _work_loop()
    while True:
        n_calls = state.n_calls  # read first: closing counts as a call
        if state.is_closed:
            return
        take_part(address, SPIN_TURNS)
        state.sleep(n_calls)


class Team:
    """The calling thread and `n_threads - 1` workers, which share the pieces of kernels.

    Only one thread at a time may call kernels with it.

    Attributes:
        address: address of the team's memory, the first argument of each kernel.
        n_threads: number of threads, with the calling one.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._memory = np.zeros(SIZE + 64, np.uint8)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        ctypes.c_int64.from_address(self.address + YIELD).value = yield_address()
        self._is_resting = False
        self._state = state = _State()
        self._finalizer = weakref.finalize(self, state.close)
        self._threads = [
            threading.Thread(
                target=_work,
                args=(state, self._memory, self.address),
                name=f"tandem-worker-{number}",
                daemon=True,
            )
            for number in range(1, n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kernel_s(self) -> float | None:
        """Time that kernels have computed, in seconds; None without a timestamp counter."""
        length = tick_s()
        return length and length * (self._word(TICKS) - self._word(WAITED))

    @property
    def waited_s(self) -> float | None:
        """Time that replays waited for other ranks, in seconds; None without such a counter."""
        length = tick_s()
        return length and length * self._word(WAITED)

    def _word(self, offset: int) -> int:
        """Return a 64-bit integer of the team's memory."""
        return ctypes.c_int64.from_address(self.address + offset).value

    def log_calls(self, log: int) -> None:
        """Record calls of kernels in the log at an address; 0 ends that."""
        ctypes.c_int64.from_address(self.address + LOG).value = log

    def wake(self) -> None:
        """Wake the workers that sleep; to be called before each kernel that uses them."""
        if self._is_resting:
            self._rest(wanted=False)
        self._state.wake()

    def rest(self) -> None:
        """Send the workers to sleep at once: other threads, such as torch's, need the cores."""
        if not self._is_resting:
            self._rest(wanted=True)

    def _rest(self, *, wanted: bool) -> None:
        """Tell the workers whether to rest."""
        self._is_resting = wanted
        ctypes.c_int64.from_address(self.address + REST).value = wanted

    def close(self) -> None:
        """End the workers and wait for that; safe to call twice."""
        self.rest()
        self._finalizer()
        for thread in self._threads:
            thread.join(JOIN_S)
