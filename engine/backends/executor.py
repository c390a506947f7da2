"""Executor for a model's ranks: one thread per rank, with the rank's device as the current one.

Ranks that exchange values in Python each need a thread. If work only has to be launched on devices,
for example the replay of a captured token, the calling thread launches it rank by rank.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.errors import CommError, DeviceError, EngineError, Sentence
from engine.hardware.faults import explain_faults
from engine.hardware.garbage import hold_garbage
from engine.hardware.torch_devices import is_out_of_memory, release_cached_memory, stream_of_rank
from engine.parallel.rank_threads import RankThreads

T = TypeVar("T")

STALL_S = 5.0
"""Number of seconds a device may spend on a token before it counts as hung."""

BATCH_STALL_S = 300.0
"""Number of seconds a device may spend on a prompt batch before it counts as hung."""

POLL_S = 50e-6
"""Polling interval in seconds."""


class RankOutOfMemory(DeviceError):
    """Out of memory on a rank's device, or on the host that computes for it.

    Attributes:
        rank: index of the rank.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(
            "{device} (rank {n}) is out of memory.", "Choose a smaller context.",
            device=str(device), n=rank,
        )  # fmt: skip
        self.rank = rank


class WorkMark(NamedTuple):
    """A point in the work of all devices: one event per rank with a GPU."""

    events: Mapping[int, torch.cuda.Event]

    @property
    def late(self) -> list[int]:
        """Ranks whose devices have not passed the mark; queries all (see `RankExecutor.wait`)."""
        return [rank for rank, event in self.events.items() if not event.query()]  # type: ignore[no-untyped-call]


class RankExecutor:
    """Executor that calls a function for each of a model's ranks.

    Ranks that share a GPU each have a CUDA stream, because a kernel that waits for another rank
    must not block that rank's kernels. A rank that has a GPU to itself uses the current stream.

    Args:
        devices: device of each rank, in rank order.
        group: communication group of the ranks.
        n_threads: number of CPU threads that torch uses per rank.

    Attributes:
        devices: device of each rank, in rank order.
        group: communication group of the ranks.
    """

    def __init__(
        self, devices: Sequence[torch.device], group: ThreadGroup, n_threads: int = 1
    ) -> None:
        self.devices = devices
        self.group = group
        self._streams = _streams(devices)
        self._stalled: set[int] = set()
        self._threads = RankThreads(
            len(devices) if len(devices) > 1 else 0,
            group.abort,
            lambda: torch.set_num_threads(n_threads),
            group,
        )

    @property
    def ranks(self) -> range:
        return range(len(self.devices))

    @property
    def has_gpus(self) -> bool:
        """Whether any rank uses a GPU and therefore computes asynchronously."""
        return any(device.type == "cuda" for device in self.devices)

    @property
    def lost(self) -> Collection[int]:
        """Ranks that have a lost thread (see `RankThreads.lost`) or a hung device."""
        return {*self._threads.lost, *self._stalled}

    def run(
        self, fn: Callable[[int], T], *, is_watched: bool = False, is_awaited: bool = True
    ) -> list[T]:
        """Call `fn` for all ranks in parallel; return the results in rank order.

        A single rank runs on the calling thread.

        Args:
            is_watched: whether a rank that makes no progress for seconds counts as lost (see
                `engine.parallel.watchdog`); for functions in which ranks never idle for long.
            is_awaited: whether results are used on streams other than the ranks' own.

        Raises:
            RankOutOfMemory: a rank's device is out of memory.
            DeviceStopped: a GPU is lost to this process.
            CommError: a rank is lost.
            BaseException: the first failure on any rank, raised once all ranks have finished.
        """

        def ranked(rank: int) -> T:
            own = self.devices[rank]
            try:
                with explain_faults([own, *self.devices]), torch.inference_mode(), self._on(rank):
                    found = fn(rank)
                    stream = self._streams[rank]
                    if stream is not None and is_awaited:
                        stream.synchronize()  # the result is used on another stream
                    return found
            except (RuntimeError, MemoryError, EngineError) as error:
                if not is_out_of_memory(error):
                    raise
                raise RankOutOfMemory(rank, own) from None

        try:
            if len(self.devices) == 1:
                return [self._alone(ranked)]
            return self._threads.call_on_all(ranked, is_watched=is_watched)
        finally:
            self.group.settle()

    def _alone(self, ranked: Callable[[int], T]) -> T:
        """Call a function for the only rank, on this thread to avoid a thread switch."""
        try:
            return ranked(0)
        except BaseException:
            self.group.abort()  # a collective may be unfinished
            raise

    def call_inline(self, fn: Callable[[int], T]) -> list[T]:
        """Call `fn` rank by rank on the calling thread.

        For functions that neither exchange values with other ranks nor wait for kernels that are
        not yet launched on another device. Garbage collection is off because freeing memory may
        synchronise a device whose kernels wait for one that has no work yet.
        """
        found = []
        with torch.inference_mode(), hold_garbage():
            for rank in self.ranks:
                with self._on(rank):
                    found.append(fn(rank))
            if sys.platform == "win32":
                for rank in self.ranks:
                    self.is_idle(rank)
        return found

    def is_idle(self, rank: int) -> bool:
        """Return whether a rank's device has finished all work.

        On Windows, the query also submits kernels that the driver has batched.
        """
        device = self.devices[rank]
        if device.type != "cuda":
            return True
        stream = self._streams[rank] or torch.cuda.current_stream(device)
        done: bool = stream.query()
        return done

    def wait(self) -> None:
        """Wait until all devices have finished the current token.

        Queries all devices each time, because a device may wait for kernels that Windows has
        batched for another one (see `is_idle`).

        Raises:
            CommError: a device hangs; see `check`.
        """
        begun = time.perf_counter()
        while busy := [rank for rank in self.ranks if not self.is_idle(rank)]:
            self.check(busy[0], begun)
            time.sleep(POLL_S)

    def mark(self) -> WorkMark:
        """Return a mark that follows all work launched on the devices so far."""
        events: dict[int, torch.cuda.Event] = {}
        for rank, device in enumerate(self.devices):
            if device.type == "cuda":
                with self._on(rank):
                    events[rank] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
        return WorkMark(events)

    def wait_for(self, mark: WorkMark) -> None:
        """Wait until all devices have passed a mark.

        Raises:
            CommError: a device takes longer than `BATCH_STALL_S`; see `check`.
        """
        begun = time.perf_counter()
        while late := mark.late:
            self.check(late[0], begun, BATCH_STALL_S)
            time.sleep(POLL_S)

    def make_room(self) -> None:
        """Wait for the devices, then free the memory that torch has cached on GPUs."""
        self.wait()
        if self.has_gpus:
            release_cached_memory([device for device in self.devices if device.type == "cuda"])

    def check(self, rank: int, begun: float, limit_s: float | None = None) -> None:
        """Check a rank's device against its time limit; a single rank has no limit.

        Args:
            begun: start time, in seconds of `time.perf_counter`.
            limit_s: limit in seconds; None for `STALL_S`.

        Raises:
            CommError: the limit is exceeded; the rank counts as lost from now on.
        """
        limit_s = STALL_S if limit_s is None else limit_s
        if len(self.devices) > 1 and time.perf_counter() > begun + limit_s:
            self._stalled.add(rank)
            self.group.abort_for_good()
            if limit_s == STALL_S:
                what = Sentence("has not computed a token within {limit:.0f} s", limit=limit_s)
            else:
                what = Sentence(
                    "has not processed a prompt batch within {limit:.0f} s", limit=limit_s
                )
            raise CommError(rank, what, str(self.devices[rank]))

    def reset(self) -> None:
        """Discard the group's unfinished exchanges after a failure."""
        self.group.abort()
        self.group.settle()

    def close(self) -> None:
        """Stop the threads; safe to call twice."""
        self._threads.close()

    def _on(self, rank: int) -> contextlib.AbstractContextManager[object]:
        device, stream = self.devices[rank], self._streams[rank]
        if device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.device(device) if stream is None else _in_stream(device, stream)


def _streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream | None]:
    """Return each rank's CUDA stream; None for the current stream.

    Streams that are created consecutively are least likely to share a hardware queue.
    """
    n_ranks = Counter(str(device) for device in devices)
    return [
        stream_of_rank(device) if device.type == "cuda" and n_ranks[str(device)] > 1 else None
        for device in devices
    ]


@contextlib.contextmanager
def _in_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a device and one of its streams current.

    The device comes first: on exit from `torch.cuda.stream`, torch activates the previous device,
    which would take hundreds of MB if that were another GPU.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
