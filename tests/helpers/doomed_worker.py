"""A child process of the GGUF fuzzer that crashes and hangs; it imports no engine."""

import os
import signal
import time
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz.gguf_outcomes import Tally


def end_at_three(
    connection: Connection, state: MutableSequence[int], seed: int, numbers: range, *_: Any
) -> None:
    """Execute cases in a child process: number 3 crashes it, number 5 never ends."""
    for number in numbers:
        state[0], state[1] = number, time.monotonic_ns()
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        while number == 5:
            time.sleep(1)
    connection.send({"header": Tally(count=len(numbers))})
