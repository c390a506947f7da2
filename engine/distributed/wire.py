"""What carries numbers between ranks that are processes, perhaps on several hosts.

`torch.distributed` does, by way of gloo: tensors in the host's memory, from one process to another.
Each process tells the others why it ends, where it can, so that all of them name the same cause.
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

FAULT = "fault"
"""Under this name the first that goes wrong is kept for all."""

STORE_S = 2.0
"""Seconds to wait for the others' store, which may be gone."""

JOIN_S = 600.0
"""Seconds in which all processes have to be there, with the model loaded."""


class Peer(NamedTuple):
    """What a process says of itself.

    Attributes:
        kind: processes of the same kind compute with the same bits.
        holds: what all must have in common, such as the model's hash.
    """

    host: str
    device: str
    kind: str
    holds: str


class Wire(Protocol):
    """Carries tensors in the host's memory; used by one thread.

    Attributes:
        peers: what the ranks said of themselves, in their order.
    """

    rank: int
    peers: Sequence[Peer]

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel]) -> None:
        """Send contiguous tensors and receive others, each with the other rank.

        What one rank sends, the other one receives in the same order.

        Raises:
            CommError: names the rank that is gone or does not answer.
        """
        ...


class GlooWire:
    """The wire of one of the processes that a launcher such as torchrun has started.

    The launcher says by environment variables who is who: RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.

    Args:
        limit_s: a rank that gives nothing for so long, while it is waited for, is taken for lost.

    Raises:
        EngineError: there is no launcher, or the others cannot be reached.
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
        """Tell the others of this process, and know of them.

        Raises:
            CommError: one is gone, or has something else in common with nobody.
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
        """See `Wire`; `limit_s` counts in place of the usual one if it is given."""
        limit = limit_s or self._limit_s
        works = [(peer, self._begun(dist.irecv, tensor, peer)) for peer, tensor in into]
        works += [(peer, self._begun(dist.isend, tensor, peer)) for peer, tensor in out]
        for peer, work in works:
            try:
                work.wait(timedelta(seconds=limit))
            except RuntimeError as error:
                raise self._fault(peer, str(error), limit) from None

    def _begun(self, begin: Callable[[Tensor, int], Any], tensor: Tensor, peer: int) -> Any:
        """What is under way to or from a rank."""
        try:
            return begin(tensor, peer)
        except RuntimeError as error:
            raise self._fault(peer, str(error)) from None

    def wait_for_all(self) -> None:
        """Until all are here, however long they load."""
        others = [rank for rank in range(len(self.peers)) if rank != self.rank]
        word = torch.zeros(1)
        self.swap(
            [(rank, word) for rank in others],
            [(rank, torch.empty(1)) for rank in others],
            max(JOIN_S, self._limit_s),
        )

    def tell(self, error: EngineError) -> None:
        """Let the others know why this process ends, unless they know of another cause."""
        if isinstance(error, CommError):
            self._first_fault(error.rank, error.problem)
        else:
            self._first_fault(self.rank, f"has failed: {str(error).rstrip('.')}")

    def close(self) -> None:
        """Take leave of the others, who must do the same."""
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()

    def _fault(self, peer: int, text: str, limit_s: float = 0.0) -> CommError:
        """What is wrong with a rank; or with the one that was found first, as all say."""
        problem = "has ended in the middle of a step"
        if "timed out" in text.lower():
            problem = f"has not answered for {limit_s or self._limit_s:g} seconds"
        rank, problem = self._first_fault(peer, problem)
        return CommError(rank, problem, name_of(self, rank))

    def _first_fault(self, rank: int, problem: str) -> tuple[int, str]:
        """Keep a fault for all, unless there is one; that counts then."""
        try:
            kept = self._store.compare_set(FAULT, "", json.dumps([rank, problem]))
            rank, problem = json.loads(kept)
        except (RuntimeError, ValueError):  # the store was kept by a process that has ended
            pass
        return rank, problem

    def _unknown(self) -> int:
        """Some other rank, where nobody knows which one."""
        return 0 if self.rank else 1


def name_of(wire: Wire, rank: int) -> str:
    """The device and the host of a rank, for people."""
    peer = wire.peers[rank]
    return f"{peer.device} on {peer.host}" if peer.host else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
