"""What kernels were called with, noted while a token is computed, so that it can be repeated.

Every call from Python passes through a stub (`cpu.kernels.fastcall`), which notes it where the
team's word `LOG` is the address of a log. A call is noted as the kernel's address, the number of
its arguments, and these: 64-bit integers all of them.

Not all that a token takes is a kernel. Whoever computes something that would come out differently
for the next token, and be repeated with the old value, `refuse`s: then the log is of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.cpu.kernels.values import I64, Code, Value
from engine.forward.recording import current_recording

USED, ROOM, CALLS = 0, 8, 64
"""Of the memory, offsets in bytes: words noted, and how many there may be; then the calls."""

CHECKED = 1 << 32
"""Added to the number of arguments of a call after which a repetition may have to stop: its first
argument is a seat of `engine.cpu.kernels.thread_all_reduce`."""

MAX_ARGUMENTS = 26
"""Of a kernel that can be repeated."""

MAX_WORDS = 1 << 18
"""Of a log: more than any known model's token takes, in memory that is given back afterwards."""

Finish = Callable[[], None]


class CallLog:
    """Calls of kernels, in order.

    Attributes:
        refusal: why they cannot be repeated; "" if they can.
        finishes: what is to be done where a repetition stops, by the place of the call in `words`.
        kept: what calls point to and nobody else keeps.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(CALLS // 8 + MAX_WORDS, np.int64)
        self._memory[ROOM // 8] = MAX_WORDS
        self.address = self._memory.ctypes.data
        self.refusal = ""
        self.finishes: dict[int, Finish] = {}
        self.kept: list[object] = []

    @property
    def n_used(self) -> int:
        """Words noted so far."""
        return int(self._memory[USED // 8])

    @property
    def words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """A copy of the calls."""
        return self._memory[CALLS // 8 :][: self.n_used].copy()

    def add_checked(self, kernel: int, arguments: Sequence[int], finish: Finish) -> None:
        """Note a call after which a repetition may stop; `finish` then does what is left of it."""
        start, words = self.n_used, (kernel, CHECKED + len(arguments), *arguments)
        self._memory[USED // 8] += len(words)
        if self.n_used > MAX_WORDS:
            return
        self._memory[CALLS // 8 + start :][: len(words)] = words
        self.finishes[start] = finish

    def check_room(self) -> None:
        """Refuse if there were more calls than are noted."""
        if self.n_used > MAX_WORDS:
            self.refusal = "a token takes too many kernels"


def current_log() -> CallLog | None:
    """Return the log of this thread, if its kernel calls are being noted."""
    found = current_recording()
    return found if isinstance(found, CallLog) else None


def emit_log(code: Code, log: Value, kernel: Value, arguments: Sequence[Value]) -> None:
    """Write the code that notes a call, if `log` is not 0."""
    with code.when(log.differs(0)):
        used = code.load(log + USED, I64)
        words = [kernel, code.number(len(arguments)), *arguments]
        code.store(used + len(words), log + USED)
        with code.when(used + len(words) <= code.load(log + ROOM, I64)):
            for n, word in enumerate(words):
                code.store(word, log + used * 8 + (CALLS + 8 * n))
