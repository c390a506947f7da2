"""Orders of rank 0, by which all other ranks do what it does: a name and plain values."""

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
    """Orders that rank 0 sends and the others receive.

    Args:
        wire: connections to the other ranks.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, name: str, *values: Any) -> None:
        """Send an order to all other ranks.

        Args:
            name: what is to be done.
            values: what JSON knows; tuples arrive as lists.

        Raises:
            CommError: a rank is gone or does not answer.
        """
        text = json.dumps([name, *values]).encode()
        sent = len(text).to_bytes(HEAD, "little") + text
        parts = [sent[:FRAME].ljust(FRAME, b"\0"), sent[FRAME:]]
        words = [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in parts if x]
        others = [rank for rank in range(len(self._wire.peers)) if rank != self._wire.rank]
        self._wire.swap([(rank, word) for rank in others for word in words], [])

    def receive(self) -> tuple[str, list[Any]]:
        """Wait for the next order; return its name and its values.

        Raises:
            CommError: rank 0 is gone, or sends nothing.
        """
        text = self._received(FRAME)
        n = HEAD + int.from_bytes(text[:HEAD], "little")
        if n > FRAME:
            text += self._received(n - FRAME)
        name, *values = json.loads(text[HEAD:n])
        return name, values

    def _received(self, n: int) -> bytes:
        """Receive n bytes of rank 0."""
        room = torch.empty(n, dtype=torch.uint8)
        self._wire.swap([], [(0, room)])
        return room.numpy().tobytes()
