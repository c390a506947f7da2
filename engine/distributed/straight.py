"""Direct transfers between machines from device memory, through a backend such as NCCL.

The alternative is `engine.distributed.process_comm`, which uses host memory and gloo. Backends only
move values; each rank adds them itself, in rank order, so both alternatives yield the same bits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.wire import JOIN_S, VERDICT_S
from engine.errors import CommError, Sentence

Ports = tuple[tuple[int, int], ...]
"""A group's ports (see `machine_comm`): pairs of a machine and its rank, in order."""

STUCK_S = 300.0
"""A missing value counts as lost after this many seconds, even if all machines are alive."""

SPINS = 2000
"""Number of polls without a pause in between; they take about a millisecond."""

NAP_S = 50e-6
"""Seconds to sleep between later polls."""


class StraightBackend(NamedTuple):
    """A `torch.distributed` backend that sends from device memory, for one device type."""

    name: str
    device: str

    @property
    def problem(self) -> str:
        """Reason why it cannot be used on this machine, as the end of a sentence; "" if it can."""
        if not dist.is_backend_available(self.name):
            return Sentence("its PyTorch build lacks {name}", name=self.name.upper())
        if self.name == "nccl" and sys.platform != "linux":
            return Sentence("NCCL requires Linux")
        return ""


NCCL = StraightBackend("nccl", "cuda")
"""The backend for NVIDIA GPUs."""

BACKEND_VARIABLE = "TANDEM_MACHINE_BACKEND"
"""Environment variable that names another backend and its device type, for example "gloo:cpu"."""


def backend_of_environment() -> StraightBackend:
    """Return the backend to try: NCCL, unless the environment names another one."""
    name, _, device = os.environ.get(BACKEND_VARIABLE, "").partition(":")
    return StraightBackend(name, device) if name and device else NCCL


class StraightCommunicator:
    """Communicator between a port and other machines' ports; see `FarCommunicator`.

    As with gloo, the host waits until values have arrived. If a process is lost, the agents end the
    others. Work that uses a value can be enqueued right after it.

    Args:
        group: process group of the ports' processes.
        ports: the ports.
        machine: index of this machine.
        device: device of this machine's port.
        lost: returns the error to raise if a value does not arrive.
    """

    def __init__(
        self, group: Any, ports: Ports, machine: int, device: torch.device,
        lost: Callable[[Ports], CommError],
    ) -> None:  # fmt: skip
        self._group, self._ports, self._device, self._lost = group, ports, device, lost
        self.machine = machine
        self.waited_s = 0.0

    def all_reduce(
        self, x: Tensor | None, group: Sequence[int], shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum over the machines, added in their order.

        Args:
            x: this machine's value, F32; None if it has none.
            group: the machines.
            shape: shape of all values.
        """
        assert shape is not None, "values without a known shape go through host memory"
        return self.sum_of_several(() if x is None else (x,), group, shape, 1)

    def sum_of_several(
        self, values: Sequence[Tensor], group: Sequence[int], shape: Sequence[int], most: int
    ) -> Tensor:
        """Return the sum of all machines' values, in order.

        Missing values are replaced by minus zero, which changes no sum, as x + -0.0 is x for all x.

        Args:
            values: this machine's values, F32.
            shape: shape of each value.
            most: largest number of values on any machine.
        """
        mine = torch.full((most, *shape), -0.0, device=self._device)
        for room, value in zip(mine, values, strict=False):
            room.copy_(value)
        shown = [torch.empty_like(mine) for _ in self._ports]
        self._run(lambda: dist.all_gather(shown, mine, self._group, async_op=True))
        first, *others = (value for several in shown for value in several.unbind())
        return sum(others, start=first)

    def broadcast(
        self, x: Tensor | None, source: int, group: Sequence[int],
        shape: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return machine `source`'s tensor, F32, on all machines; `shape` as in `all_reduce`."""
        assert shape is not None, "values without a known shape go through host memory"
        is_mine = self.machine == source
        assert not is_mine or x is not None, "the source must have a value"
        if is_mine and x is not None:
            room = x.detach().contiguous()
        else:
            room = torch.empty(tuple(shape), device=self._device)
        self._run(lambda: dist.broadcast(room, source, self._group, async_op=True))
        return x if is_mine and x is not None else room

    def _run(self, begin: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        try:
            is_done = _finished(begin(), self._device)
        except RuntimeError:
            is_done = False
        if not is_done:
            time.sleep(VERDICT_S)  # agents may end this process first, with the actual reason
            raise self._lost(self._ports)
        self.waited_s += time.perf_counter() - begun


def _finished(work: Any, device: torch.device) -> bool:
    """Wait until a transfer is done; return False if it takes too long.

    NCCL's `wait` makes only the stream wait (or sleeps, given a timeout), so poll an event.
    """
    if device.type != "cuda":
        work.wait(timedelta(seconds=STUCK_S))
        return True
    work.wait()
    event, deadline = torch.cuda.current_stream(device).record_event(), time.monotonic() + STUCK_S
    for n in range(sys.maxsize):
        if event.query():
            return True
        if n > SPINS:
            time.sleep(NAP_S)
            if time.monotonic() > deadline:
                break
    return False


class StraightGroup(NamedTuple):
    """A process group whose ports exchange values directly."""

    processes: Any
    ports: Ports


class StraightGroups:
    """One machine's process groups, each for one tuple of ports.

    Args:
        backend: backend that sends.
        machine: index of this machine.
        names: names of all machines.

    Attributes:
        why_not: why the backend was abandoned, as a sentence about a machine; "" if it was not.
        is_stuck: whether a thread of this process hangs in the backend.
    """

    def __init__(self, backend: StraightBackend, machine: int, names: Sequence[str]) -> None:
        self.backend, self.machine = backend, machine
        self.why_not, self.is_stuck = "", False
        self._names = names
        self._groups: dict[tuple[Ports, tuple[str, ...]], Any] = {}

    def make(self, ports: Ports, devices: tuple[str, ...]) -> StraightGroup:
        """Return the ports' process group; all machines create all groups in the same order.

        Args:
            devices: the ports' devices, as a connection is bound to them.

        Raises:
            RuntimeError: the others do not connect, or the backend fails.
        """
        key = ports, devices
        if key not in self._groups:
            machines, limit = [machine for machine, _ in ports], timedelta(seconds=JOIN_S)
            self._groups[key] = dist.new_group(machines, limit, self.backend.name)
        return StraightGroup(self._groups[key], ports)

    def communicator(self, group: StraightGroup, device: torch.device) -> StraightCommunicator:
        """Return a communicator for this machine's port, on the port's device."""
        return StraightCommunicator(group.processes, group.ports, self.machine, device, self._error)

    @property
    def is_used(self) -> bool:
        """Whether any groups exist."""
        return bool(self._groups)

    def _error(self, ports: Ports) -> CommError:
        others = [machine for machine, _ in ports if machine != self.machine]
        why = Sentence(
            "no longer sends or receives through {backend}", backend=self.backend.name.upper()
        )
        return CommError(others[0], why, self._names[others[0]])

    def abort(self, why: str = "") -> None:
        """Abort all transfers and drop the groups; safe to call twice."""
        self.why_not = self.why_not or why
        groups, self._groups = self._groups, {}
        for group in groups.values():
            with suppress(RuntimeError, AttributeError):  # on other machines it is a number
                group.abort()
