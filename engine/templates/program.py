"""The program that renders chat templates: a line of JSON in, a line of JSON out, for each prompt.

It sets its own limit of memory, where the system has one, and ends with its standard input. If a
template hangs and the process that should end this one is gone, `faulthandler` does: its thread
needs no lock of Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from engine.templates.limits import GRACE_S, MAX_ADDED, MAX_MEMORY, OUT_OF_MEMORY, PIPE_BUFFER
from engine.templates.rendering import render


def main() -> None:
    """Answer the requests of standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that started this one
    _limit_memory()
    _say({"is_ready": True})
    with open(0, "rb", PIPE_BUFFER) as requests:
        for line in requests:
            try:
                _say(_answer(line))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


def _answer(line: bytes) -> dict[str, str]:
    request = json.loads(line)
    now, seconds = request["now"], request["seconds"]
    faulthandler.dump_traceback_later(seconds + 4 * GRACE_S, exit=True)
    try:
        return render(
            request["source"],
            request["given"],
            None if now is None else datetime.fromisoformat(now),
            seconds,
            len(line) + MAX_ADDED,
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def _say(message: dict[str, Any]) -> None:
    text = json.dumps(message, ensure_ascii=False) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Have allocations fail beyond `MAX_MEMORY`, and leave no core file.

    Linux counts all private memory as data. macOS takes the limit and does not enforce it, and
    Windows has none: there the other side's looks at this process are the limit.
    """
    if sys.platform == "win32":
        return
    import resource

    for kind, most in ((resource.RLIMIT_DATA, MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
