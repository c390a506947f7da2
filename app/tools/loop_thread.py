"""A thread with an asyncio loop, which begins with the first thing that is to be done there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An asyncio loop on a thread of its own.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended its work."""
        return self._is_closed

    def post(self, work: Callable[[], None]) -> bool:
        """Call `work` on the thread, in the order of calls; return whether it still does such."""
        with self._lock:
            if self._is_closed:
                return False
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(work)
            return True

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task; on the thread only."""
        assert self._loop is not None, "called from a loop that runs"
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it alive
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> bool:
        """Do `last` on the thread, and end it; return whether that was done in time."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return True
        if not was_closed:
            loop.call_soon_threadsafe(lambda: self.spawn(self._end(last())))
        thread.join(timeout_s)
        return not thread.is_alive()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None, "runs in it"
        try:
            await last
        finally:
            self._loop.stop()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None, "made before the thread"
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._cancel_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _cancel_rest(self) -> None:
        """End tasks that are left."""
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
