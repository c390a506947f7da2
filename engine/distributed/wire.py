"""Connections between a model's processes, one on each machine.

They use `torch.distributed` with gloo, which sends tensors from host memory. If a process is lost,
the agents end the others, so that none waits forever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import CommError, EngineError, Sentence

Parcel = tuple[int, Tensor]
"""The machine at the other end, and the tensor to send or receive."""

JOIN_S = 60.0
"""Seconds within which all processes must connect."""

NAME_BYTES = 256
"""Maximum length of a machine's name, in bytes."""

IDLE = timedelta(days=30)
"""Gloo's timeout for a tensor; a long time may pass before the next order."""

VERDICT_S = 4.0
"""Seconds to let the agents report which process has failed. The process that closed a connection
may merely have lost the others itself."""


class Peer(NamedTuple):
    """Description of a process, known to all others.

    Attributes:
        name: name of its machine.
        kind: kind of its devices; devices of equal kinds compute the same bits.
    """

    name: str
    kind: str


class Wire:
    """Gloo connections to the other machines' processes, for tensors in host memory.

    Torchrun's agents start the processes and set the environment variables RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT.

    Args:
        name: name of this machine.

    Attributes:
        rank: index of this machine.
        peers: descriptions of all machines' processes, by machine index.

    Raises:
        EngineError: no agent started this process, or the others cannot be reached.
    """

    def __init__(self, name: str) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise EngineError(
                "This build of PyTorch cannot connect processes.", "Install a build with gloo."
            )
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_S))
            self.rank, found = dist.get_rank(), _gathered_names(name)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                "The other machines' processes cannot be reached ({problem}).",
                "Check the network interface, and that firewalls allow all ports between machines.",
                problem=_first_line(error),
            ) from None
        self.peers: Sequence[Peer] = [Peer(each, "") for each in found]
        self._group = dist.group.WORLD

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel], tag: int = 0) -> None:
        """Send contiguous tensors and receive others, each to or from one machine.

        Tensors with the same tag arrive in the order in which they are sent.

        Args:
            out: tensors to send, and the machines to send to.
            into: memory for the received tensors, and the machines that send them.
            tag: channel; threads that may be at different steps use different channels.

        Raises:
            CommError: a process is lost; the error names its machine.
        """
        assert self._group is not None, "it is made with the connections"
        works = [(peer, self._begun(self._group.recv, tensor, peer, tag)) for peer, tensor in into]
        works += [(peer, self._begun(self._group.send, tensor, peer, tag)) for peer, tensor in out]
        for peer, work in works:
            self._wait(peer, work)

    def expect(self, machine: int, room: Tensor, tag: int = 0) -> Callable[[], None]:
        """Start to receive a tensor from a machine, so that the sender does not have to wait.

        Returns:
            Function that waits for the tensor and raises the same errors as `swap`.
        """
        assert self._group is not None, "it is made with the connections"
        return partial(self._wait, machine, self._begun(self._group.recv, room, machine, tag))

    def _wait(self, peer: int, work: Any) -> None:
        try:
            work.wait(IDLE)
        except RuntimeError:
            raise self._lost(peer) from None

    def _begun(self, begin: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return begin([tensor], peer, tag)
        except RuntimeError:
            raise self._lost(peer) from None

    def _lost(self, peer: int) -> CommError:
        time.sleep(VERDICT_S)  # agents may end this process first, with the actual reason
        problem = Sentence("has stopped in the middle of a step")
        return CommError(peer, problem, self.peers[peer].name)

    def close(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()


def _gathered_names(name: str) -> list[str]:
    """Exchange all machines' names as plain bytes, as unpickling network data may run code."""
    mine = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    rooms = [torch.empty(NAME_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(rooms, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [room.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for room in rooms]


def name_of(wire: Wire, machine: int) -> str:
    """Return a machine's name for use in errors."""
    return wire.peers[machine].name


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without its full stop, or the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


HEAD = 8
"""Size in bytes of the field that contains an order's length."""

FRAME = 4096
"""Size in bytes of an order's first message, in which most prompt batches fit; a longer order's
remainder follows in a second one."""

TAG = 2
"""Tag of orders, which may overtake tensors of earlier orders; groups of ranks have odd tags."""


class Orders:
    """Channel for machine 0's orders to the others, and for values that all machines exchange."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._expected: tuple[Tensor, Callable[[], None]] | None = None

    def send(self, name: str, *values: Any) -> None:
        """Send an order and its JSON values to all other machines, where tuples arrive as lists.

        Raises:
            CommError: a machine is lost.
        """
        words = [torch.frombuffer(x, dtype=torch.uint8) for x in _framed([name, *values]) if x]
        self._wire.swap([(machine, word) for machine in self._others for word in words], [], TAG)

    def expect(self) -> None:
        """Receive the next order in the background while the last one is being carried out.

        This lets machine 0 send a prompt's next batch while this machine computes the last one.
        """
        room = torch.empty(FRAME, dtype=torch.uint8)
        self._expected = room, self._wire.expect(0, room, TAG)

    def receive(self) -> tuple[str, list[Any]]:
        """Wait for the next order; return its name and values.

        Raises:
            CommError: machine 0 is lost.
        """
        if self._expected is None:
            self.expect()
        assert self._expected is not None, "it has just been set"
        (room, wait), self._expected = self._expected, None
        wait()
        text = room.numpy().tobytes()
        if (n := _size(text) - FRAME) > 0:
            rest = torch.empty(n, dtype=torch.uint8)
            self._wire.swap([], [(0, rest)], TAG)
            text += rest.numpy().tobytes()
        name, *values = _value(text)
        return name, values

    def all_gather(self, value: Any) -> list[Any]:
        """Return all machines' JSON values; all machines call it at the same point.

        Raises:
            CommError: a machine is lost.
        """
        mine = [torch.frombuffer(x, dtype=torch.uint8) for x in _framed(["", value]) if x]
        rooms = {machine: torch.empty(FRAME, dtype=torch.uint8) for machine in self._others}
        # in one call, as gloo sends a tensor only once it is waited for
        first = [(machine, mine[0]) for machine in self._others]
        self._wire.swap(first, list(rooms.items()))
        rests = {
            machine: torch.empty(n, dtype=torch.uint8)
            for machine, room in rooms.items()
            if (n := _size(room.numpy().tobytes()) - FRAME) > 0
        }
        rest = [(machine, word) for machine in self._others for word in mine[1:]]
        self._wire.swap(rest, list(rests.items()))
        found = {self._wire.rank: value}
        for machine, room in rooms.items():
            more = rests[machine].numpy().tobytes() if machine in rests else b""
            found[machine] = _value(room.numpy().tobytes() + more)[1]
        return [found[machine] for machine in range(len(self._wire.peers))]

    @property
    def _others(self) -> list[int]:
        return [number for number in range(len(self._wire.peers)) if number != self._wire.rank]


def _framed(value: Any) -> tuple[bytearray, bytearray]:
    text = json.dumps(value, separators=(",", ":")).encode()
    sent = len(text).to_bytes(HEAD, "little") + text
    return bytearray(sent[:FRAME].ljust(FRAME, b"\0")), bytearray(sent[FRAME:])


def _size(text: bytes) -> int:
    return HEAD + int.from_bytes(text[:HEAD], "little")


def _value(text: bytes) -> Any:
    return json.loads(text[HEAD : _size(text)])
