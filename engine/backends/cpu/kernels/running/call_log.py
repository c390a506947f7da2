"""Log of the kernel calls for a token, recorded for replays.

Every call from Python goes through a stub (`running.fastcall`), which records it if the pool's word
`LOG` is the address of a log. A call is recorded as 64-bit integers: the kernel's address, the
number of arguments, and the arguments.

Code that computes a token-dependent value outside kernels calls `refuse_replay`, because a replay
would use the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.backends.cpu.kernels.language.values import I64, Code, Value
from engine.model.forward.recording import (
    Replayable,
    current_recording,
    recording_to,
    refuse_replay,
)

USED, ROOM, CALLS = 0, 8, 64
"""Byte offsets in a log's memory: number of recorded words, capacity, calls."""

CHECKED = 1 << 32
"""Flag in an all-reduce's argument count: a replay may have to stop after this call. The call's
first argument is a seat of `running.thread_all_reduce`."""

MAX_ARGUMENTS = 26
"""Largest number of arguments that a replayable kernel may have."""

MAX_WORDS = 1 << 18
"""Capacity of a log, in words: more than any known model needs per token."""

Finish = Callable[[], None]
"""Function that completes the call after which a replay stopped, or runs a Python step."""


class CallLog(Replayable):
    """Replayable kernel calls, in order.

    Attributes:
        address: address of the log's memory.
        finishes: functions to call after a replay has stopped, by the last call's index in `words`.
        kept: owners of the memory to which the calls point.
        add_step: adds a Python step after the calls recorded so far; None outside a recorder.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(CALLS // 8 + MAX_WORDS, np.int64)
        self._memory[ROOM // 8] = MAX_WORDS
        self.address = self._memory.ctypes.data
        self.finishes: dict[int, Finish] = {}
        self.kept: list[object] = []
        self.add_step: Callable[[Finish], None] | None = None

    @property
    def n_used(self) -> int:
        """Number of words recorded so far."""
        return int(self._memory[USED // 8])

    @property
    def words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Copy of the recorded words."""
        return self._memory[CALLS // 8 :][: self.n_used].copy()

    def add_checked(self, kernel: int, arguments: Sequence[int], finish: Finish) -> None:
        """Record a call after which a replay may stop; `finish` then completes it."""
        start, words = self.n_used, (kernel, CHECKED + len(arguments), *arguments)
        self._memory[USED // 8] += len(words)
        if self.n_used > MAX_WORDS:
            return
        self._memory[CALLS // 8 + start :][: len(words)] = words
        self.finishes[start] = finish

    def check_room(self) -> None:
        """Refuse the replay if the log has overflowed."""
        if self.n_used > MAX_WORDS:
            self.refusal = "a token needs too many kernel calls"


def current_log() -> CallLog | None:
    """Return the log to which this thread is recording, or None."""
    found = current_recording()
    return found if isinstance(found, CallLog) else None


def take_step(step: Finish) -> None:
    """Run a Python step, both now and in each replay of this thread's recording.

    It must read and write the same memory each time; its own operations are not recorded.
    """
    log = current_log()
    with recording_to(None):
        step()
    if log is not None and log.add_step is not None:
        log.add_step(step)
    else:
        refuse_replay("it includes steps in Python")


def emit_log(code: Code, log: Value, kernel: Value, arguments: Sequence[Value]) -> None:
    """Emit code that records a call if `log` is not 0."""
    with code.when(log.differs(0)):
        used = code.load(log + USED, I64)
        words = [kernel, code.number(len(arguments)), *arguments]
        code.store(used + len(words), log + USED)
        with code.when(used + len(words) <= code.load(log + ROOM, I64)):
            for n, word in enumerate(words):
                code.store(word, log + used * 8 + (CALLS + 8 * n))
