"""Collectives between ranks of which some are threads of this process, others on other machines.

Ranks of one machine meet in its memory. Of each machine one rank, the *port* of the group, sends to
the others. Where a token is recorded or captured, what crosses is a step between its parts that
every replay takes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.call_log import take_step
from engine.backends.gpu.launch.graph import host_step, host_step_value

if TYPE_CHECKING:
    from engine.distributed.straight import Ports
    from engine.model.forward.communicator import Communicator, FusedAllReduce, Group


class RankLayout:
    """Numbers of the machines' ranks; each machine has consecutive ones.

    Args:
        sizes: number of ranks of each machine.
        number: number of this machine.

    Attributes:
        local: numbers of the ranks of this machine.
        n_ranks: number of ranks of all machines.
    """

    def __init__(self, sizes: Sequence[int], number: int) -> None:
        self._machine_of = [machine for machine, n in enumerate(sizes) for _ in range(n)]
        self.n_ranks, first = sum(sizes), sum(sizes[:number])
        self.number, self.local = number, range(first, first + sizes[number])
        self._known: dict[Group, tuple[Group, Group]] = {}

    def machine_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return self._machine_of[rank]

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among those of its machine."""
        return rank - self.local.start

    def ports(self, group: Group, source: int | None = None) -> Ports:
        """Return the rank of each machine that sends and receives for a group's members there.

        Args:
            source: rank that has the value; None where all have one.
        """
        found: dict[int, int] = {}
        for rank in group if source is None else (source, *group):
            found.setdefault(self._machine_of[rank], rank)
        return tuple(sorted(found.items()))

    def most(self, group: Group) -> int:
        """Return the largest number of a group's members on one machine."""
        machines = [self._machine_of[rank] for rank in group]
        return max(map(machines.count, machines))

    def parts(self, group: Group) -> tuple[Group, Group]:
        """Return the local ranks of a group's members here, and the machines of all members."""
        found = self._known.get(group)
        if found is None:
            here = tuple(self.local_rank(rank) for rank in group if rank in self.local)
            machines = tuple(sorted({self._machine_of[rank] for rank in group}))
            found = self._known[group] = here, machines
        return found


class FarCommunicator(Protocol):
    """A way of tensors between the ports of several machines, for one group of ranks.

    Attributes:
        waited_s: seconds spent sending and receiving so far.

    Raises:
        CommError: a machine is gone; the error names it.
    """

    waited_s: float

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum over machines of which each has one value, or None; see `Communicator`."""
        ...

    def sum_of_several(
        self, values: Sequence[Tensor], group: Group, shape: Sequence[int], most: int
    ) -> Tensor:
        """Return the sum over all machines of what each of them has, in order.

        Args:
            values: this machine's partial sums; at least one machine has some.
            group: the machines.
            shape: shape of each value.
            most: largest number of values of a machine.
        """
        ...

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor of machine `source` on all machines of the group."""
        ...


Way = Callable[..., FarCommunicator]
"""Returns a communicator with the other machines, whose ranks are machines, for calls of one kind,
given the ports, whether shapes are known, and what tells the kind from others."""


class MachineCommunicator:
    """Communicator of a rank beside which others are on other machines; see `Communicator`.

    Args:
        inner: communicator with the ranks of this machine, which go by their numbers here.
        way: returns communicators with the other machines.
        layout: numbers of the machines' ranks.
        abroad: local ranks that wait for another machine, kept up here.

    Attributes:
        rank: number of the rank.
    """

    def __init__(self, inner: Communicator, way: Way, layout: RankLayout, abroad: set[int]) -> None:
        self._local_rank = inner.rank
        self.rank = layout.local[inner.rank]
        self._inner, self._layout, self._abroad = inner, layout, abroad
        self._way = way
        self._fars: dict[object, FarCommunicator] = {}

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s + sum(far.waited_s for far in self._fars.values())

    def _far(
        self, shape: Sequence[int] | None, group: Group, source: int | None = None
    ) -> FarCommunicator:
        """Return the communicator with the other machines for a group, and what it broadcasts."""
        kind = ("sum", group) if source is None else ("broadcast", source, group)
        key = shape is not None, *kind
        if key not in self._fars:
            ports = self._layout.ports(group, source)
            self._fars[key] = self._way(ports, shape is not None, *kind)
        return self._fars[key]

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        here, machines = self._layout.parts(group)
        if len(machines) == 1:
            return self._inner.all_reduce(x, here, shape)
        far = self._far(shape, group)
        if len(machines) == len(group):
            return self._repeated(lambda: far.all_reduce(x, machines, shape))
        assert shape is not None, "layers know the shape of what they sum"
        most = self._layout.most(group)
        return self._repeated(lambda: self._sum(x, here, machines, shape, far, most))

    def _sum(
        self, x: Tensor | None, here: Group, machines: Group, shape: Sequence[int],
        far: FarCommunicator, most: int,
    ) -> Tensor:  # fmt: skip
        """Return the sum over all machines' ranks, in the order of the ranks."""
        joined = self._inner.gather(x, here)
        total = None
        if self._local_rank == here[0]:
            parts = () if joined is None else torch.split(joined, shape[-1], -1)
            total = far.sum_of_several(parts, machines, shape, most)
        return self._inner.broadcast(total, here[0], here, shape)

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join the slices of this machine's ranks on the first of them; see `Communicator.gather`.

        What machines have is joined outside of passes, see `MachineRunner`.
        """
        return self._inner.gather(x, self._layout.parts(group)[0], alike)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        here, machines = self._layout.parts(group)
        if len(machines) == 1:
            return self._inner.broadcast(x, self._layout.local_rank(source), here, shape)
        origin = self._layout.machine_of(source)
        port = self._layout.local_rank(source) if origin == self._layout.number else here[0]
        if self._local_rank == port:
            far = self._far(shape, group, source)
            x = self._crossed(x, far, origin, machines, shape)
        return (
            x if len(here) == 1 and x is not None else self._inner.broadcast(x, port, here, shape)
        )

    def _crossed(
        self, x: Tensor | None, far: FarCommunicator, origin: int, machines: Group,
        shape: Sequence[int] | None,
    ) -> Tensor:  # fmt: skip
        """Send x to other machines, or receive it; return it."""
        if origin != self._layout.number:
            return self._repeated(lambda: far.broadcast(None, origin, machines, shape))
        assert x is not None, "the source must have a value"
        host_step(lambda: take_step(lambda: _drop(far.broadcast(x, origin, machines, shape))))
        return x

    def _repeated(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` makes now; each replay writes what it makes then there.

        A GPU's token is captured, a CPU's is recorded, and each leaves the other's way alone.
        """
        found = host_step_value(lambda: self._recorded(compute))
        assert found is not None, "all members of a group get a value"
        return found

    def _recorded(self, compute: Callable[[], Tensor]) -> Tensor:
        """Do as `_repeated` for tokens that are recorded."""
        rooms: list[Tensor] = []

        def step() -> None:
            self._abroad.add(self._local_rank)
            try:
                found = compute()
            finally:
                self._abroad.discard(self._local_rank)
            if rooms:
                rooms[0].copy_(found)
            else:
                rooms.append(found)

        take_step(step)
        return rooms[0]

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        here, machines = self._layout.parts(group)
        return self._inner.one_shot(here, n) if len(machines) == 1 else None


def _drop(x: object) -> None:
    """Do nothing with a result."""
