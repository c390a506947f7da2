"""Collectives between ranks that are threads of this process or run on other machines.

Ranks on one machine communicate through its memory. In each group, one rank per machine, the
*port*, exchanges values with the other machines. If a token is recorded or captured, each exchange
is a step between the parts of the recording, and every replay repeats it.
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
    """Assignment of rank indices to machines; each machine's indices are consecutive.

    Args:
        sizes: number of ranks on each machine.
        number: index of this machine.

    Attributes:
        local: indices of this machine's ranks.
        n_ranks: number of ranks on all machines together.
    """

    def __init__(self, sizes: Sequence[int], number: int) -> None:
        self._machine_of = [machine for machine, n in enumerate(sizes) for _ in range(n)]
        self.n_ranks, first = sum(sizes), sum(sizes[:number])
        self.number, self.local = number, range(first, first + sizes[number])
        self._known: dict[Group, tuple[Group, Group]] = {}

    def machine_of(self, rank: int) -> int:
        """Return a rank's machine."""
        return self._machine_of[rank]

    def local_rank(self, rank: int) -> int:
        """Return a rank's index on its machine."""
        return rank - self.local.start

    def ports(self, group: Group, source: int | None = None) -> Ports:
        """Return each machine's port for a group.

        Args:
            source: rank that has the value; None if all ranks have one.
        """
        found: dict[int, int] = {}
        for rank in group if source is None else (source, *group):
            found.setdefault(self._machine_of[rank], rank)
        return tuple(sorted(found.items()))

    def most(self, group: Group) -> int:
        """Return the largest number of a group's members on any machine."""
        machines = [self._machine_of[rank] for rank in group]
        return max(map(machines.count, machines))

    def parts(self, group: Group) -> tuple[Group, Group]:
        """Return a group's ranks on this machine, as local indices, and all members' machines."""
        found = self._known.get(group)
        if found is None:
            here = tuple(self.local_rank(rank) for rank in group if rank in self.local)
            machines = tuple(sorted({self._machine_of[rank] for rank in group}))
            found = self._known[group] = here, machines
        return found


class FarCommunicator(Protocol):
    """Exchange of tensors between several machines' ports, for one group of ranks.

    Attributes:
        waited_s: seconds spent sending and receiving so far.

    Raises:
        CommError: a machine is lost; the error names it.
    """

    waited_s: float

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum of the machines' values, any of which may be None; see `Communicator`."""
        ...

    def sum_of_several(
        self, values: Sequence[Tensor], group: Group, shape: Sequence[int], most: int
    ) -> Tensor:
        """Return the sum of all machines' values, in order.

        Args:
            values: this machine's partial sums, if any; at least one machine has some.
            group: the machines.
            shape: shape of each value.
            most: largest number of values on any machine.
        """
        ...

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return machine `source`'s tensor on all machines in the group."""
        ...


Way = Callable[..., FarCommunicator]
"""Creates a communicator between machines for one kind of call. It gets the ports, whether shapes
are known, and values that identify the kind."""


class MachineCommunicator:
    """Communicator for one rank of a model on several machines; see `Communicator`.

    Args:
        inner: communicator with this machine's ranks, which uses local rank indices.
        way: creates communicators with the other machines.
        layout: assignment of rank indices to machines.
        abroad: set of the local ranks that wait for another machine, updated here.
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
        """Return the communicator with other machines for a group and, in a broadcast, a source."""
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
        assert shape is not None, "layers know the shape of a sum"
        most = self._layout.most(group)
        return self._repeated(lambda: self._sum(x, here, machines, shape, far, most))

    def _sum(
        self, x: Tensor | None, here: Group, machines: Group, shape: Sequence[int],
        far: FarCommunicator, most: int,
    ) -> Tensor:  # fmt: skip
        joined = self._inner.gather(x, here)
        total = None
        if self._local_rank == here[0]:
            parts = () if joined is None else torch.split(joined, shape[-1], -1)
            total = far.sum_of_several(parts, machines, shape, most)
        return self._inner.broadcast(total, here[0], here, shape)

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join the slices of this machine's ranks on the first of them; see `Communicator.gather`.

        The machines' results are joined outside passes; see `MachineRunner`.
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
        if origin != self._layout.number:
            return self._repeated(lambda: far.broadcast(None, origin, machines, shape))
        assert x is not None, "the source must have a value"
        host_step(lambda: take_step(lambda: _drop(far.broadcast(x, origin, machines, shape))))
        return x

    def _repeated(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`; every replay of a captured or recorded token computes it again."""
        found = host_step_value(lambda: self._recorded(compute))
        assert found is not None, "all members of a group get a value"
        return found

    def _recorded(self, compute: Callable[[], Tensor]) -> Tensor:
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
    """Return None, for a step without a result."""
