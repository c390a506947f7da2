"""Admission of answers to the engine: a number of places, and a queue before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.server.refusal import Refusal

RETRY_S = (1, 60)
"""Least and most seconds after which a refused client is asked to try again."""


class Admission:
    """Places of the engine, and the queue before them, in the order of arrival.

    Args:
        most_running: number of places.
        most_waiting: number of answers in the line, beyond which a request is refused.

    Attributes:
        n_running: number of taken places.
        n_waiting: number of answers in the line.
    """

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running, self._most_waiting = most_running, most_waiting
        self.n_running = self.n_waiting = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # that an answer takes, about

    @asynccontextmanager
    async def places(self, n: int) -> AsyncIterator[None]:
        """Take n places for the `async with` block, once they are free.

        Raises:
            Refusal: the line is too long.
        """
        n = min(n, self._most_running)
        if self._line or self.n_running + n > self._most_running:
            await self._wait(n)
        else:
            self.n_running += n
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            self._seconds += 0.2 * (loop.time() - start - self._seconds)
            self._give_back(n)

    async def _wait(self, n: int) -> None:
        """Wait for n places, which are taken then."""
        if self.n_waiting + n > self._most_waiting:
            raise Refusal(
                429, f"{self.n_waiting} answers are waiting already.", "Try again later.",
                code="queue_full", retry_after_s=self.retry_after_s,
            )  # fmt: skip
        turn = n, asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self.n_waiting += n
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn[1].done() and not turn[1].cancelled():
                self._give_back(n)  # it had its place already
            else:
                self._line.remove(turn)
                self._let_in()
            raise
        finally:
            self.n_waiting -= n

    @property
    def retry_after_s(self) -> int:
        """Seconds after which there may be room."""
        rounds = (self.n_waiting + self.n_running) / self._most_running
        return int(min(max(self._seconds * rounds, RETRY_S[0]), RETRY_S[1]))

    def _give_back(self, n: int) -> None:
        self.n_running -= n
        self._let_in()

    def _let_in(self) -> None:
        """Give free places to the first in the line."""
        while self._line and self.n_running + self._line[0][0] <= self._most_running:
            n, turn = self._line.popleft()
            if not turn.cancelled():
                self.n_running += n
                turn.set_result(None)
