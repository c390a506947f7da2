"""Limits for what servers of tools send: a size for each message, and how fast they may come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import anyio
import mcp.client.stdio
from anyio.streams.text import TextReceiveStream

from app.tools.server_store import MAX_MESSAGE

MESSAGES_AT_ONCE: Final = 1000
MESSAGES_PER_S: Final = 500.0
BYTES_AT_ONCE: Final = 16 << 20
BYTES_PER_S: Final = float(2 << 20)

FLOOD_S: Final = 10.0
"""Seconds for which a server may send as fast as it can."""


class FloodLimit:
    """A token bucket that slows a sender down, and gives it up if it never pauses.

    Args:
        burst: amount that may come at once.
        rate: amount that may come each second.
        on_flood: is called once the sender has used all of that for `FLOOD_S`.
    """

    def __init__(self, burst: float, rate: float, on_flood: Callable[[], None]) -> None:
        self._burst, self._rate, self._on_flood = burst, rate, on_flood
        self._left, self._at = burst, time.monotonic()
        self._slowed_since: float | None = None

    async def take(self, amount: float = 1.0) -> None:
        """Wait until `amount` may come."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - amount
        self._at = now
        if self._left > self._burst / 2:
            self._slowed_since = None
        if self._left >= 0:
            return
        if self._slowed_since is None:
            self._slowed_since = now
        elif now - self._slowed_since > FLOOD_S:
            self._on_flood()
        await anyio.sleep(-self._left / self._rate)


class LimitedText(TextReceiveStream):
    """What a program prints, in whole lines; it ends before one that is too long.

    Takes the place of the stream of the package `mcp`, which keeps a line however long it grows.
    """

    def __post_init__(self, encoding: str, errors: str) -> None:
        super().__post_init__(encoding, errors)
        self._open: list[str] = []  # pieces of a line whose end has not come
        self._n_open = 0
        self._on_large = on_large_line.get()

    async def receive(self) -> str:
        """Return the next lines, or the last one without its end."""
        while self._n_open <= MAX_MESSAGE:
            try:
                text = await super().receive()
            except anyio.EndOfStream:
                if not self._open:
                    raise
                return self._taken("")
            whole, end, rest = text.rpartition("\n")
            if end:
                lines = self._taken(whole + end)
                self._open, self._n_open = [rest], len(rest)
                return lines
            self._open.append(text)
            self._n_open += len(text)
        self._on_large()
        raise anyio.EndOfStream

    def _taken(self, more: str) -> str:
        text = "".join([*self._open, more])
        self._open, self._n_open = [], 0
        return text


on_large_line: ContextVar[Callable[[], None]] = ContextVar("on_large_line", default=lambda: None)
"""Function that is called if a program prints too long a line, set where the program is run."""

mcp.client.stdio.TextReceiveStream = LimitedText  # type: ignore[attr-defined]


def cap_listed(message: Any, most: int) -> None:
    """Drop tools from a message beyond `most`, before time and memory are spent on them."""
    result = getattr(getattr(message, "message", None), "result", None)
    tools = result.get("tools") if isinstance(result, dict) else None
    if isinstance(tools, list):
        del tools[most:]
