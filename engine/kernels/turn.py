"""Whose turn it is to run Python, among threads that compute with kernels side by side.

A thread that comes back from a kernel needs Python's lock. If another one has it, the system puts
the thread to sleep, and waking it takes as long as a small kernel. Therefore such threads first
wait awake until it is their turn, which each has from there to its next kernel: then nobody else of
them is likely to have the lock. That is courtesy, not safety: the wait is bounded, as who has the
turn may be held up, and then the lock itself decides.

It matters only where several take part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine.kernels.team import YIELD, load, pause, yield_address
from engine.kernels.values import I64, Code, Value

OWNER, N_THREAD, SIZE = 0, 64, 128
"""Offsets in bytes: the thread that has the turn, as the interpreter calls it, or 0; how many take
part. There is also the system's function at `YIELD`."""

AWAKE_TURNS = 2_000
"""How often a thread looks before it goes ahead; about a tenth of a millisecond."""

YIELD_TURNS = 50
"""See `engine.kernels.meeting`."""

_memory = np.zeros((SIZE + 64) // 8, np.int64)
_address = -(-_memory.ctypes.data // 64) * 64
_words = _memory[(_address - _memory.ctypes.data) // 8 :].data
_words[YIELD // 8] = yield_address()
_lock = threading.Lock()


def address() -> int:
    """What `give` and `take` need."""
    return _address


@contextmanager
def taking_part() -> Iterator[None]:
    """Count the present thread in."""
    with _lock:
        _words[N_THREAD // 8] += 1
    try:
        yield
    finally:
        with _lock:
            _words[N_THREAD // 8] -= 1
        give_up()


def give_up() -> None:
    """Let others have the turn, before sleeping. Taking it from one of them does little harm."""
    _words[OWNER // 8] = 0


def give(code: Code, turn: Value, thread: Value) -> None:
    """Write the code by which a thread ends its turn, if it has it."""
    with code.when(load(code, turn + N_THREAD) > 1):
        _exchange(code, turn, thread, code.number(0))


def take(code: Code, turn: Value, thread: Value) -> None:
    """Write the code by which a thread waits for its turn."""
    waited, has_it = code.variable(code.number(0)), code.variable(code.number(0))
    with code.when(load(code, turn + N_THREAD) > 1), code.forever() as leave:
        with code.when(load(code, turn + OWNER).equals(0)):
            has_it.set(_exchange(code, turn, code.number(0), thread))
        leave((has_it.get() > 0) | (waited.get() >= AWAKE_TURNS))
        pause(code, turn, waited, YIELD_TURNS)


def _exchange(code: Code, turn: Value, old: Value, new: Value) -> Value:
    """Make `new` the owner if `old` is it; 1 if so, else 0."""
    place = code.builder.inttoptr((turn + OWNER).raw, I64.as_pointer())
    result = code.builder.cmpxchg(place, old.raw, new.raw, "seq_cst", "seq_cst")
    return Value(code, code.builder.extract_value(result, 1)).to(I64, signed=False)
