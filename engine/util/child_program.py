"""The loop of a sandboxed child that answers each line with a line and limits its memory.

`engine.util.sandbox` enforces the limits; those set here apply if that process has exited or cannot
check. Imports little, so that a child starts quickly.
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
"""Buffer size of a pipe; a long chat takes hundreds of kilobytes."""

OUT_OF_MEMORY = 3
"""Exit status of a child that ran out of memory."""


def answer_lines(answer: Callable[[bytes], Mapping[str, object]], max_bytes: int) -> None:
    """Answer each request on standard input with a line of JSON, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is meant for the parent process
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
    """Kill this process if the `with` block takes longer than this, even while the GIL is held."""
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
    # Allocations fail beyond the limit, and no core file is written. Linux counts all private
    # memory as data. macOS does not enforce the limit, and Windows has none, so that only the
    # parent's checks apply there.
    if sys.platform == "win32":
        return
    import resource

    for kind, most in ((resource.RLIMIT_DATA, max_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
