"""A connection between two processes that carries messages."""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Generic, TypeVar

from engine.hosts.process.codec import LARGEST_BYTES, Codec

Out = TypeVar("Out")
In = TypeVar("In")


class Channel(Generic[Out, In]):
    """One end of a connection; several threads may send, one receives.

    Args:
        outgoing: codec of the messages that are sent.
        incoming: codec of those that arrive.
    """

    def __init__(self, connection: Connection, outgoing: Codec[Out], incoming: Codec[In]) -> None:
        self._connection, self._outgoing, self._incoming = connection, outgoing, incoming
        self._lock = threading.Lock()

    def send(self, message: Out) -> None:
        """Send a message; wait while the other end takes none.

        Raises:
            MessageError: it cannot cross.
            OSError: the other end is gone.
        """
        data = self._outgoing.pack(message)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self, timeout_s: float | None = None) -> In | None:
        """Return the next message; None if there is none within the time.

        Raises:
            MessageError: what arrived is no message.
            EOFError, OSError: the other end is gone, or sent more than a message may have.
        """
        if not self._connection.poll(timeout_s):
            return None
        return self._incoming.unpack(self._connection.recv_bytes(LARGEST_BYTES))

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def connected_pair() -> tuple[Connection, Connection]:
    """Return the two ends of a connection that no other process can find."""
    return Pipe()


def inherited_connection(handle: int) -> Connection:
    """Return the end of a connection that this process has from its parent."""
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        return PipeConnection(handle)
    return Connection(handle)
