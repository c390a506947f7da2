"""Orders of machine 0, by which the others do what it does: a name and plain values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.distributed.wire import Wire

HEAD = 8
"""Bytes that say how long an order is."""

FRAME = 4096
"""Bytes of the first message of an order; what does not fit comes in a second one. Most prompts'
batches fit."""

TAG = 2
"""Tag of orders, which may come before tensors of earlier ones; groups of ranks have odd ones."""


class Orders:
    """Orders that machine 0 sends and the others receive, and what all tell each other.

    Args:
        wire: connections to the other machines.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._expected: tuple[Tensor, Callable[[], None]] | None = None

    def send(self, name: str, *values: Any) -> None:
        """Send an order to all other machines.

        Args:
            name: what is to be done.
            values: what JSON knows; tuples arrive as lists.

        Raises:
            CommError: a machine is gone.
        """
        words = [torch.frombuffer(x, dtype=torch.uint8) for x in _framed([name, *values]) if x]
        self._wire.swap([(machine, word) for machine in self._others for word in words], [], TAG)

    def expect(self) -> None:
        """Let machine 0 send the next order while the last one is followed.

        So it goes on with the next batch of a prompt while this machine computes the last one.
        """
        room = torch.empty(FRAME, dtype=torch.uint8)
        self._expected = room, self._wire.expect(0, room, TAG)

    def receive(self) -> tuple[str, list[Any]]:
        """Wait for the next order; return its name and its values.

        Raises:
            CommError: machine 0 is gone.
        """
        if self._expected is None:
            self.expect()
        assert self._expected is not None, "it has just been set"
        (room, wait), self._expected = self._expected, None
        wait()
        text = room.numpy().tobytes()
        if (n := _size(text) - FRAME) > 0:
            rest = torch.empty(n, dtype=torch.uint8)
            self._wire.swap([], [(0, rest)], TAG)
            text += rest.numpy().tobytes()
        name, *values = _value(text)
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


def _framed(value: Any) -> tuple[bytearray, bytearray]:
    """Return the frame of a message, and what does not fit in it."""
    text = json.dumps(value, separators=(",", ":")).encode()
    sent = len(text).to_bytes(HEAD, "little") + text
    return bytearray(sent[:FRAME].ljust(FRAME, b"\0")), bytearray(sent[FRAME:])


def _size(text: bytes) -> int:
    """Return the number of bytes of a message, given its first ones."""
    return HEAD + int.from_bytes(text[:HEAD], "little")


def _value(text: bytes) -> Any:
    """Return the value of a message."""
    return json.loads(text[HEAD : _size(text)])
