"""The loop of a child that answers lines with lines, within limits that it sets for itself.

`sandbox.child` is its other side, whose limits are the firm ones; those here hold where that
process is gone or has no memory for its looks. This module imports little, so that a child starts
at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

PIPE_BUFFER = 1 << 18
"""Bytes that each side reads from a pipe at once; a long chat has hundreds of kilobytes."""

OUT_OF_MEMORY = 3
"""Exit status of a child that got no more memory."""


def answer_lines(answer: Callable[[bytes], Mapping[str, object]], max_bytes: int) -> None:
    """Answer the requests of standard input until it ends, each with a line of JSON.

    Args:
        answer: returns the answer to a request.
        max_bytes: memory that this process may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that started this one
    _limit_memory(max_bytes)
    _say({"is_ready": True})
    with open(0, "rb", PIPE_BUFFER) as requests:
        for line in requests:
            try:
                _say(answer(line))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


@contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """End this process if the `with` block takes longer, whatever it does.

    The thread that does so needs no lock of Python.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _say(message: Mapping[str, object]) -> None:
    text = json.dumps(message, ensure_ascii=False) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def _limit_memory(max_bytes: int) -> None:
    """Have allocations fail beyond a limit, and leave no core file.

    Linux counts all private memory as data. macOS takes the limit and does not enforce it, and
    Windows has none: there the other side's looks at this process are the limit.
    """
    if sys.platform == "win32":
        return
    import resource

    for kind, most in ((resource.RLIMIT_DATA, max_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
