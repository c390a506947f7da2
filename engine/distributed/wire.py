"""Connections between ranks that are processes, perhaps on several hosts.

They use `torch.distributed` with gloo, which sends tensors in host memory from one process to
another. A process that fails tells the others why, if it can, so that all report the same cause.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import CommError, EngineError

Parcel = tuple[int, Tensor]
"""Rank to send to or receive from, and the tensor."""

FAULT = "fault"
"""Key of the first fault of any process in the store that all share."""

STORE_S = 2.0
"""Seconds to wait for the shared store, whose process may be gone."""

JOIN_S = 600.0
"""Seconds within which all processes must have started and loaded the model."""


class Peer(NamedTuple):
    """Description of a process, sent to all others.

    Attributes:
        host: name of the host.
        device: id of the rank's device.
        kind: kind of the device; ranks of one kind compute the same bits.
        holds: text that must be equal in all processes, such as the model's hash.
    """

    host: str
    device: str
    kind: str
    holds: str


class Wire(Protocol):
    """Connections to the other ranks for tensors in host memory; used by one thread.

    Attributes:
        rank: number of this process's rank.
        peers: descriptions of all ranks, in rank order.
    """

    rank: int
    peers: Sequence[Peer]

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel]) -> None:
        """Send contiguous tensors and receive others, each to or from one rank.

        Tensors from one rank to another arrive in the order in which they are sent.

        Args:
            out: tensors to send, and the ranks to send to.
            into: memory for the received tensors, and the ranks that send them.

        Raises:
            CommError: a rank is gone or does not answer; names it.
        """
        ...


class GlooWire:
    """Connections by gloo of one of the processes that a launcher such as torchrun has started.

    The launcher sets the environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        limit_s: seconds without data after which a rank that is waited for counts as lost.

    Attributes:
        rank: number of this process's rank.
        peers: descriptions of all ranks, in rank order; empty texts before `introduce`.

    Raises:
        EngineError: there is no launcher, or the other processes cannot be reached.
    """

    def __init__(self, limit_s: float) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise EngineError(
                "This build of PyTorch cannot connect processes.", "Install one with gloo."
            )
        try:
            store, self.rank, n_ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=n_ranks,
                timeout=timedelta(seconds=max(JOIN_S, limit_s)),
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                f"The other processes cannot be reached ({_first_line(error)}).",
                "Start them with torchrun.",
            ) from None
        self.peers: Sequence[Peer] = [Peer("", "", "", "")] * n_ranks
        self._store = dist.PrefixStore("tandem", store)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=STORE_S))
        self._limit_s = limit_s

    def introduce(self, device: str, kind: str, holds: str) -> None:
        """Exchange descriptions with all other processes.

        Args:
            device: id of this rank's device.
            kind: kind of the device, see `Peer`.
            holds: text that must be equal in all processes, see `Peer`.

        Raises:
            CommError: a process is gone, or its `holds` differs from rank 0's.
        """
        mine = Peer(socket.gethostname(), device, kind, holds)
        found: list[Peer] = [mine] * len(self.peers)
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            raise self._fault(self._unknown(), _first_line(error)) from None
        self.peers = [Peer(*peer) for peer in found]
        for rank, peer in enumerate(self.peers):
            if peer.holds != self.peers[0].holds:
                raise CommError(rank, "has another file than rank 0", name_of(self, rank))

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel], limit_s: float = 0.0) -> None:
        """Send and receive tensors, see `Wire.swap`; a `limit_s` replaces the usual limit."""
        limit = limit_s or self._limit_s
        works = [(peer, self._begun(dist.irecv, tensor, peer)) for peer, tensor in into]
        works += [(peer, self._begun(dist.isend, tensor, peer)) for peer, tensor in out]
        for peer, work in works:
            try:
                work.wait(timedelta(seconds=limit))
            except RuntimeError as error:
                raise self._fault(peer, str(error), limit) from None

    def _begun(self, begin: Callable[[Tensor, int], Any], tensor: Tensor, peer: int) -> Any:
        """Begin to send or receive a tensor; return the request to wait for."""
        try:
            return begin(tensor, peer)
        except RuntimeError as error:
            raise self._fault(peer, str(error)) from None

    def least_of_all(self, n: int) -> int:
        """Return the smallest number that any process calls this with.

        They may still load the model, so it waits for the longer of `JOIN_S` and the limit.
        """
        others = [rank for rank in range(len(self.peers)) if rank != self.rank]
        word = torch.tensor([n])
        found = {rank: torch.empty_like(word) for rank in others}
        self.swap(
            [(rank, word) for rank in others], list(found.items()), max(JOIN_S, self._limit_s)
        )
        return min(n, *(int(x) for x in found.values())) if found else n

    def tell(self, error: EngineError) -> None:
        """Tell the others why this process ends, unless another fault came first."""
        if isinstance(error, CommError):
            self._first_fault(error.rank, error.problem)
        else:
            self._first_fault(self.rank, f"has failed: {str(error).rstrip('.')}")

    def close(self) -> None:
        """Close the connections; waits for the others, which must close theirs as well."""
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()

    def _fault(self, peer: int, text: str, limit_s: float = 0.0) -> CommError:
        """Return the error for a rank that failed, or for the first fault if there was one before.

        Args:
            peer: number of the rank.
            text: message of the failed request.
            limit_s: time limit of the request in seconds; 0 for the usual one.
        """
        problem = "has ended in the middle of a step"
        if "timed out" in text.lower():
            problem = f"has not answered for {limit_s or self._limit_s:g} seconds"
        rank, problem = self._first_fault(peer, problem)
        return CommError(rank, problem, name_of(self, rank))

    def _first_fault(self, rank: int, problem: str) -> tuple[int, str]:
        """Store a fault for all processes unless there is one already; return the first fault."""
        try:
            kept = self._store.compare_set(FAULT, "", json.dumps([rank, problem]))
            rank, problem = json.loads(kept)
        except (RuntimeError, ValueError):  # the store was kept by a process that has ended
            pass
        return rank, problem

    def _unknown(self) -> int:
        """Return some other rank, for faults whose rank is not known."""
        return 0 if self.rank else 1


def name_of(wire: Wire, rank: int) -> str:
    """Return the device and the host of a rank, for errors; "" if they are not known."""
    peer = wire.peers[rank]
    return f"{peer.device} on {peer.host}" if peer.host else ""


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
