"""Orders of machine 0, by which the others do what it does: a name and plain values."""

from __future__ import annotations

import json
from typing import Any

import torch

from engine.distributed.wire import Wire

HEAD = 8
"""Bytes that say how long an order is."""

FRAME = 4096
"""Bytes of the first message of an order; what does not fit comes in a second one."""


class Orders:
    """Orders that machine 0 sends and the others receive, and what all tell each other.

    Args:
        wire: connections to the other machines.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, name: str, *values: Any) -> None:
        """Send an order to all other machines.

        Args:
            name: what is to be done.
            values: what JSON knows; tuples arrive as lists.

        Raises:
            CommError: a machine is gone.
        """
        words = [torch.frombuffer(x, dtype=torch.uint8) for x in _framed([name, *values]) if x]
        self._wire.swap([(machine, word) for machine in self._others for word in words], [])

    def receive(self) -> tuple[str, list[Any]]:
        """Wait for the next order; return its name and its values.

        Raises:
            CommError: machine 0 is gone.
        """
        name, *values = self._received(0)
        return name, values

    def told(self, value: Any) -> list[Any]:
        """Tell all other machines a value that JSON knows; return all machines' values.

        All call it at the same place.

        Raises:
            CommError: a machine is gone.
        """
        mine = [torch.frombuffer(x, dtype=torch.uint8) for x in _framed(["", value]) if x]
        rooms = {machine: torch.empty(FRAME, dtype=torch.uint8) for machine in self._others}
        # all at once, as gloo sends a tensor only where it is waited for
        first = [(machine, mine[0]) for machine in self._others]
        self._wire.swap(first, list(rooms.items()))
        rests = {
            machine: torch.empty(n, dtype=torch.uint8)
            for machine, room in rooms.items()
            if (n := _size(room.numpy().tobytes()) - FRAME) > 0
        }
        rest = [(machine, word) for machine in self._others for word in mine[1:]]
        self._wire.swap(rest, list(rests.items()))
        found = {self._wire.rank: value}
        for machine, room in rooms.items():
            more = rests[machine].numpy().tobytes() if machine in rests else b""
            found[machine] = _value(room.numpy().tobytes() + more)[1]
        return [found[machine] for machine in range(len(self._wire.peers))]

    @property
    def _others(self) -> list[int]:
        """Numbers of the other machines."""
        return [number for number in range(len(self._wire.peers)) if number != self._wire.rank]

    def _received(self, machine: int) -> Any:
        """Receive a message of a machine; return its value."""
        text = self._bytes(machine, FRAME)
        n = _size(text)
        return _value(text + self._bytes(machine, n - FRAME) if n > FRAME else text)

    def _bytes(self, machine: int, n: int) -> bytes:
        """Receive n bytes of a machine."""
        room = torch.empty(n, dtype=torch.uint8)
        self._wire.swap([], [(machine, room)])
        return room.numpy().tobytes()


def _framed(value: Any) -> tuple[bytearray, bytearray]:
    """Return the frame of a message, and what does not fit in it."""
    text = json.dumps(value).encode()
    sent = len(text).to_bytes(HEAD, "little") + text
    return bytearray(sent[:FRAME].ljust(FRAME, b"\0")), bytearray(sent[FRAME:])


def _size(text: bytes) -> int:
    """Return the number of bytes of a message, given its first ones."""
    return HEAD + int.from_bytes(text[:HEAD], "little")


def _value(text: bytes) -> Any:
    """Return the value of a message."""
    return json.loads(text[HEAD : _size(text)])
