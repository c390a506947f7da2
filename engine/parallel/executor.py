"""The ranks of a model as threads of this process, each on its device; and all of them from one.

Ranks that meet in Python need a thread each. What is only started on devices, such as a token that
was captured, the calling thread starts on all of them, one after the other.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch

from engine.errors import CommError, DeviceError
from engine.hardware.torch_devices import is_out_of_memory, release_cached_memory, stream_of_rank
from engine.parallel.rank_threads import RankThreads
from engine.parallel.thread_comm import ThreadGroup

T = TypeVar("T")

STALL_S = 5.0
"""A token takes less: a device that is not through with it by then will never be."""

POLL_S = 50e-6
"""Between looks at a device, in which other threads run."""


class RankOutOfMemory(DeviceError):
    """A rank's device, or the host, has no room for what it computes."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(
            f"The memory of {device} (rank {rank}) is full.", "Choose a smaller context."
        )
        self.rank = rank


class RankExecutor:
    """Runs functions for all ranks of a model.

    Ranks that share a GPU have a stream each there: one that waits for another must not keep it
    from beginning. A rank that is alone on a GPU uses the one that is there anyway.

    Args:
        group: where ranks meet.
        n_threads: of each rank on the CPU.

    Attributes:
        devices: of the ranks, in their order.
    """

    def __init__(
        self, devices: Sequence[torch.device], group: ThreadGroup, n_threads: int = 1
    ) -> None:
        self.devices = devices
        self.group = group
        self._streams = _streams(devices)
        self._stalled: set[int] = set()
        self._threads = RankThreads(
            len(devices), group.abort, lambda: torch.set_num_threads(n_threads), group
        )

    @property
    def ranks(self) -> range:
        """Their numbers."""
        return range(len(self.devices))

    @property
    def has_gpus(self) -> bool:
        """Whether some do their work later than the host gives it to them."""
        return any(device.type == "cuda" for device in self.devices)

    @property
    def lost(self) -> Collection[int]:
        """Ranks that do not come back, see `RankThreads`, or whose devices do not."""
        return {*self._threads.lost, *self._stalled}

    def run(self, fn: Callable[[int], T], *, is_watched: bool = False) -> list[T]:
        """Call `fn` for each rank, on its thread; the results in rank order.

        Args:
            is_watched: ranks never rest for long in it.

        Raises:
            RankOutOfMemory: a device has no room.
            BaseException: the first failure of any rank, after all have ended.
        """

        def ranked(rank: int) -> T:
            try:
                with torch.inference_mode(), self._on(rank):
                    found = fn(rank)
                    stream = self._streams[rank]
                    if stream is not None:
                        stream.synchronize()  # whoever uses the result uses another one
                    return found
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise RankOutOfMemory(rank, self.devices[rank]) from None

        try:
            return self._threads.call_on_all(ranked, is_watched=is_watched)
        finally:
            self.group.settle()

    def here(self, fn: Callable[[int], T]) -> list[T]:
        """The same on this thread, for what meets no other rank, and does not wait for what is yet
        to be started on another device.

        Nothing may come in between that waits for all of a device, for it may be waiting for one
        that was not begun yet; so no garbage is collected meanwhile.
        """
        found = []
        with torch.inference_mode(), _uncollected():
            for rank in self.ranks:
                with self._on(rank):
                    found.append(fn(rank))
            if sys.platform == "win32":
                for rank in self.ranks:
                    self.is_idle(rank)
        return found

    def is_idle(self, rank: int) -> bool:
        """Whether its device has done all; asking also hands on what Windows has collected."""
        device = self.devices[rank]
        if device.type != "cuda":
            return True
        stream = self._streams[rank] or torch.cuda.current_stream(device)
        done: bool = stream.query()
        return done

    def wait(self) -> None:
        """Until all devices have done what they were given for a token.

        All are asked each time: one may wait for what Windows has collected for another.

        Raises:
            CommError: one does not come to an end.
        """
        begun = time.perf_counter()
        while busy := [rank for rank in self.ranks if not self.is_idle(rank)]:
            self.check(busy[0], begun)
            time.sleep(POLL_S)

    def make_room(self) -> None:
        """Give back memory that is in no use; devices may wait for all that they do."""
        self.wait()
        if self.has_gpus:
            release_cached_memory([device for device in self.devices if device.type == "cuda"])

    def check(self, rank: int, begun: float) -> None:
        """Look at the clock while a rank's device is waited for; a single one has all the time.

        Args:
            begun: when it had been given a token, in seconds of `time.perf_counter`.

        Raises:
            CommError: it takes too long; the rank counts as lost.
        """
        if len(self.devices) > 1 and time.perf_counter() > begun + STALL_S:
            self._stalled.add(rank)
            self.group.lose()
            what = f"has not computed a token within {STALL_S:.0f} s"
            raise CommError(rank, what, str(self.devices[rank]))

    def begin_anew(self) -> None:
        """Forget what was under way where ranks meet, after something has failed."""
        self.group.abort()
        self.group.settle()

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._threads.close()

    def _on(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """Have torch's current device and stream be the rank's."""
        device, stream = self.devices[rank], self._streams[rank]
        if device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.device(device) if stream is None else _in_stream(device, stream)


def _streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream | None]:
    """Of each rank; None for the one that is current anyway.

    All are made at once: what a driver does with streams that follow on each other is least likely
    to share a queue.
    """
    n_ranks = Counter(str(device) for device in devices)
    return [
        stream_of_rank(device) if device.type == "cuda" and n_ranks[str(device)] > 1 else None
        for device in devices
    ]


@contextlib.contextmanager
def _in_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """The device comes first: where a stream of another one is left, torch makes the device from
    before current, which takes hundreds of MB there even if nobody uses it.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let no garbage be collected, which might free memory of a device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
