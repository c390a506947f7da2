"""Connections between ranks that are processes, for tests where they are threads."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from engine.distributed.wire import Parcel, Peer, Wire
from engine.errors import CommError


class Queues:
    """Connections between ranks: tensors that were sent and not yet received."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.ways: defaultdict[tuple[int, int, int], queue.SimpleQueue[Tensor]]
        self.ways = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()
        self.peers = [Peer(f"host{rank}", kind) for rank, kind in enumerate(kinds)]
        self.is_broken = threading.Event()


class QueueWire(Wire):
    """Connections of one rank over queues."""

    def __init__(self, queues: Queues, rank: int) -> None:
        self.rank, self.peers, self._queues = rank, queues.peers, queues  # no process group
        self.n_sent = 0

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel], tag: int = 0) -> None:
        for peer, tensor in out:
            assert tensor.is_contiguous()
            assert peer != self.rank
            self._way(self.rank, peer, tag).put(tensor.clone())
            self.n_sent += tensor.nbytes
        for peer, tensor in into:
            found = self._received(peer, tag)
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), "read as it was sent"
            tensor.copy_(found)

    def expect(self, machine: int, room: Tensor, tag: int = 0) -> Callable[[], None]:
        return lambda: self.swap([], [(machine, room)], tag)

    def _way(self, source: int, goal: int, tag: int) -> queue.SimpleQueue[Tensor]:
        with self._queues.lock:
            return self._queues.ways[source, goal, tag]

    def _received(self, peer: int, tag: int) -> Tensor:
        while not self._queues.is_broken.is_set():
            try:
                return self._way(peer, self.rank, tag).get(timeout=0.05)
            except queue.Empty:
                pass
        raise CommError(peer, "has stopped in the middle of a step")
