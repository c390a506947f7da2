"""Several threads that work on one kernel: they wait awake during a pass, and asleep between.

A kernel is a function `task(arguments, index)`, called once for every index below `n`. The thread
that asks for it works too, and whoever is free takes the next index, so that a thread which the
system holds up delays nobody but its own piece. One 64-bit word says how many pieces of the present
job nobody has taken yet, and, above, how many jobs there have been. A thread takes a piece by
exchanging the word, which fails if another thread or job came first; so if it succeeds, all else
that it has read about the job is right.

Waking a thread takes longer than a small kernel, hence the waiting awake; it is bounded.
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
LEFT_BITS = 32
MAX_PIECES = (1 << (LEFT_BITS - 1)) - 1
WORD, TASK, ARGUMENTS, PIECES, YIELD = 0, 64, 72, 80, 88
TICKS, REST, LOG, WAITED, DONE, SIZE = 96, 104, 112, 120, 128, 192
"""Offsets in bytes; what several threads write lies in cache lines of its own. At `TICKS`, callers
of kernels add up the time that these take, by `cpu.kernels.timestamp_counter`, and at `WAITED` how
much of that was waiting for other ranks; at `LOG` is the address of where they note them, or 0."""

SPIN_TURNS = 60_000
"""How often a waiting thread looks for work before it sleeps; one or two milliseconds, longer than
ranks wait awake for each other, so that who comes first finds its helpers awake."""

YIELD_TURNS = 2_000
"""After so many turns the system may run another thread here."""


def add_run(module: ir.Module) -> None:
    """Give a module `run(team, task, arguments, n)`: a job of n ≤ `MAX_PIECES` pieces, 0 too."""
    _add_step(module)
    code, (team, task, arguments, n) = function(module, "run", 4)
    word = load(code, team + WORD)
    store(code, task, team + TASK)
    store(code, arguments, team + ARGUMENTS)
    store(code, n, team + PIECES)
    store(code, code.number(0), team + DONE)
    job = (word >> LEFT_BITS) + 1
    store(code, (job << LEFT_BITS) | n, team + WORD)
    with code.forever() as leave:
        leave(code.call("step", I64, team).equals(0))
    waited = code.variable(code.number(0))
    with code.forever() as leave:
        leave(load(code, team + DONE) >= n)
        pause(code, team, waited)
    code.builder.ret_void()


def _build_help(module: ir.Module) -> None:
    """`help(team, turns)` takes part in all jobs until there has been none for so many turns.

    Where the team is to rest, it does not wait.
    """
    _add_step(module)
    code, (team, turns) = function(module, "help", 2)
    idle = code.variable(code.number(0))
    with code.forever() as leave:
        did = code.call("step", I64, team)
        with code.when(did > 0):
            idle.set(code.number(0))
        leave(idle.get() > turns)
        leave(did.equals(0) & (load(code, team + REST) > 0))
        pause(code, team, idle)
    code.builder.ret_void()


def _add_step(module: ir.Module) -> None:
    """`step(team)` does one piece of the present job and returns 1, or 0 if none is left."""
    code, (team,) = function(module, "step", 1, I64)
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
    """What several threads write, a 64-bit integer."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    return Value(code, code.builder.load_atomic(place, "seq_cst", 8))


def store(code: Code, number: Value, address: Value) -> None:
    """Write what several threads read; all see all such writes in one order."""
    place = code.builder.inttoptr(address.raw, I64.as_pointer())
    code.builder.store_atomic(number.raw, place, "seq_cst", 8)


def pause(code: Code, team: Value, waited: Variable, yield_turns: int = YIELD_TURNS) -> None:
    """Let the core breathe, and now and then let the system run someone else on it.

    Args:
        team: or what else has the system's function at `YIELD`.
        waited: how many turns so far; it is counted here.
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
def _help() -> Callable[[int, int], None]:
    address = jit.addresses_by_source("team", chosen(), ["help"], _build_help)["help"]
    return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)


def yield_address() -> int:
    """The system's function that lets another thread run."""
    if sys.platform == "win32":
        library, name = ctypes.WinDLL("kernel32"), "SwitchToThread"
    else:
        library, name = ctypes.CDLL(None), "sched_yield"
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class _State:
    """Which helpers sleep; they know this and not the team, which ends them when it is dropped."""

    def __init__(self) -> None:
        self.n_asleep = 0
        self.n_calls = 0
        self.is_closed = False
        self._condition = threading.Condition()

    def sleep(self, n_calls: int) -> None:
        """Wait for a call; come back at once if there have been more than so many."""
        with self._condition:
            self.n_asleep += 1
            if self.n_calls == n_calls:
                self._condition.wait()
            self.n_asleep -= 1

    def wake(self) -> None:
        """Call all helpers. Who is about to sleep has said so or sees the call, so none is lost."""
        self.n_calls += 1
        if self.n_asleep:
            with self._condition:
                self._condition.notify_all()

    def close(self) -> None:
        self.is_closed = True
        self.wake()


def _work(state: _State, memory: object, address: int) -> None:
    """A helper's life; `memory` is what it must not outlive."""
    take_part = _help()
    while True:
        n_calls = state.n_calls  # read first: closing counts as a call
        if state.is_closed:
            return
        take_part(address, SPIN_TURNS)
        state.sleep(n_calls)


class Team:
    """The calling thread and `n_threads - 1` helpers.

    One thread at a time may ask it to work.

    Attributes:
        address: what kernels get.
        n_threads: with the caller.
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
                name=f"tandem-helper-{number}",
                daemon=True,
            )
            for number in range(1, n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kernel_s(self) -> float | None:
        """Seconds that its kernels have worked so far; None where no clock is known."""
        length = tick_s()
        return length and length * (self._word(TICKS) - self._word(WAITED))

    @property
    def waited_s(self) -> float | None:
        """Seconds that repeated calls have waited for other ranks; None where no clock is known."""
        length = tick_s()
        return length and length * self._word(WAITED)

    def _word(self, offset: int) -> int:
        return ctypes.c_int64.from_address(self.address + offset).value

    def log_calls(self, log: int) -> None:
        """Have calls of kernels noted in the log at an address; no longer if it is 0."""
        ctypes.c_int64.from_address(self.address + LOG).value = log

    def wake(self) -> None:
        """Call the helpers that sleep; to be called before each job."""
        if self._is_resting:
            self._rest(wanted=False)
        self._state.wake()

    def rest(self) -> None:
        """Let the helpers sleep at once: other threads, such as torch's, need the cores."""
        if not self._is_resting:
            self._rest(wanted=True)

    def _rest(self, *, wanted: bool) -> None:
        self._is_resting = wanted
        ctypes.c_int64.from_address(self.address + REST).value = wanted

    def close(self) -> None:
        """End the helpers, and wait for that; safe to call twice."""
        self.rest()
        self._finalizer()
        for thread in self._threads:
            thread.join(JOIN_S)
