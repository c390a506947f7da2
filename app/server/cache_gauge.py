"""How full the KV cache is, for monitors that ask every second."""

from __future__ import annotations

import asyncio

from app.server.link import EngineLink
from engine import CacheCounted, CountCache, EngineError

PATIENCE_S = 0.25
"""Longest wait for the engine, in seconds, which answers between two passes."""


class CacheGauge:
    """The use of the KV cache, asked of the engine at most once at a time.

    An engine that is busy with a long pass, or loads a model, answers late: until then the last
    numbers hold.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._asking: asyncio.Task[None] | None = None
        self._latest: CacheCounted | None = None

    async def read(self) -> CacheCounted | None:
        """Return the use of the cache; None without a model, or where the engine cannot tell."""
        if self._link.model is None:
            self._latest = None
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_S)
        return self._latest

    async def _ask(self) -> None:
        try:
            found = await self._link.run(CountCache())
        except EngineError:  # such as one of a model that another machine computes
            self._latest = None
            return
        self._latest = found if isinstance(found, CacheCounted) else None
