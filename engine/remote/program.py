"""The program of the engine's process: `python -m engine.remote.program HANDLE PARENT`.

HANDLE is its inherited end of the connection, PARENT the id of the process that started it. It ends
when it is told to, and when its parent has ended, however that happened.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

from engine.events import Event, HostEvent
from engine.host import ThreadHost
from engine.programs import tie_to_parent
from engine.remote.channel import Channel, inherited_connection
from engine.remote.messages import (
    FROM_ENGINE,
    TO_ENGINE,
    CloseMessage,
    FromEngine,
    SubmitMessage,
    ToEngine,
)
from engine.remote.sender import EventSender

CLOSE_S = 4.0
"""Seconds that the engine has to free its model."""

OOM_SCORE = "300"
"""Thousandths that Linux adds to this process's size where it must kill one for lack of memory."""


def main() -> int:
    """Run the engine, and return the exit status."""
    handle, parent = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # a terminal sends Ctrl+C, and that it closes, to both processes, and the window ends this one
    # when its last chat is saved; a handler, unlike SIG_IGN, is not inherited
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), lambda *_: None)
    tie_to_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        return 1  # it has ended before
    _offer_memory()
    channel = Channel(inherited_connection(handle), FROM_ENGINE, TO_ENGINE)
    return 0 if serve(channel) else 1


def serve(channel: Channel[FromEngine, ToEngine], *first: Event) -> bool:
    """Do what the window asks for until the end, and return whether the engine ended in time.

    Args:
        first: events that are sent before all others.
    """
    sender = EventSender(channel)
    for event in first:
        sender.put(HostEvent(0, event))
    numbers = CommandNumbers()

    def forward(event: HostEvent) -> None:
        sender.put(HostEvent(numbers.of_window(event.generation), event.event))

    host = ThreadHost(forward)
    try:
        while not isinstance(message := channel.receive(), CloseMessage):
            if isinstance(message, SubmitMessage):
                numbers.add(message.generation)
                host.submit(message.command)
            elif message is None:
                continue
            elif message.generation is None:
                host.cancel()
            elif own := numbers.of_host(message.generation):
                host.cancel(own)
    except (EOFError, OSError):  # the window's process is gone
        pass
    finally:
        last = threading.Timer(2 * CLOSE_S, os._exit, (1,))
        last.daemon = True
        last.start()
        is_ended = host.close(CLOSE_S)
    sender.close()
    return is_ended


class CommandNumbers:
    """The window's numbers of commands and the host's own, which count from 1 without a gap.

    Both only rise, so what is kept does not grow with the commands, only with the gaps between the
    window's numbers: commands of earlier processes, and those that could not be sent.
    """

    def __init__(self) -> None:
        self._n = 0
        self._own, self._windows = [0], [0]  # the first numbers of each run without a gap

    def add(self, window: int) -> None:
        """Note the window's number of the command that the host gets next."""
        if window - self._n - 1 != self._windows[-1] - self._own[-1]:
            self._windows.append(window)  # first, as another thread finds it by the host's
            self._own.append(self._n + 1)
        self._n += 1

    def of_window(self, own: int) -> int:
        """Return the window's number of a command of the host; 0 for none's."""
        at = bisect_right(self._own, own) - 1
        return self._windows[at] + own - self._own[at]

    def of_host(self, window: int) -> int:
        """Return the host's number of a command of the window; 0 for one that it never got."""
        at = bisect_right(self._windows, window) - 1
        own = self._own[at] + window - self._windows[at]
        end = self._own[at + 1] if at + 1 < len(self._own) else self._n + 1
        return own if own < end else 0


def _offer_memory() -> None:
    """Have Linux end this process rather than the window where memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


if __name__ == "__main__":
    sys.exit(main())
