"""Program of the engine's process: `python -m engine.hosts.process.program HANDLE PARENT`.

HANDLE is its inherited end of the connection, PARENT the id of the process that started it. It
exits on request, and when its parent has exited for any reason.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from engine.events import Event, HostEvent
from engine.hosts.process.channel import (
    FROM_ENGINE,
    TO_ENGINE,
    Channel,
    CloseMessage,
    EventSender,
    FromEngine,
    SubmitMessage,
    ToEngine,
    inherited_connection,
)
from engine.hosts.thread_host import ThreadHost
from engine.util.programs import tie_to_parent

CLOSE_S = 4.0
"""Seconds that the engine has to free its model."""

SWITCH_S = 0.0005
"""Python's thread switch interval, in seconds, instead of 0.005, because a thread that parses a
long request may run for seconds and should not delay the engine thread."""

OOM_SCORE = "300"
"""This process's OOM score on Linux, so that it is killed before the window's process."""


def main() -> int:
    """Run the engine; return the exit status."""
    handle, parent = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # a terminal sends SIGINT and SIGHUP to both processes, but the window stops this one after
    # saving its last chat; a handler, unlike SIG_IGN, is not inherited
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), lambda *_: None)
    tie_to_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        return 1  # the parent is already gone
    _offer_memory()
    channel = Channel(inherited_connection(handle), FROM_ENGINE, TO_ENGINE)
    if not serve(channel):
        os._exit(1)  # a thread is still computing; Python would stop it inside C++ code and abort
    return 0


def serve(channel: Channel[FromEngine, ToEngine], *first: Event) -> bool:
    """Process messages until closed; return whether the engine stopped in time.

    Args:
        first: events to send before all others.
    """
    sender = EventSender(channel)
    for event in first:
        sender.put(HostEvent(0, event))
    host = ThreadHost(sender.put)
    try:
        while not isinstance(message := channel.receive(), CloseMessage):
            if isinstance(message, SubmitMessage):
                host.submit(message.command, message.command_id)
            elif message is not None:
                host.cancel(message.command_id)
    except (EOFError, OSError):  # the window's process is gone
        pass
    finally:
        last = threading.Timer(2 * CLOSE_S, os._exit, (1,))
        last.daemon = True
        last.start()
        is_ended = host.close(CLOSE_S)
    sender.close()
    return is_ended


def _offer_memory() -> None:
    """Have Linux kill this process rather than the window's if memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


if __name__ == "__main__":
    sys.exit(main())
