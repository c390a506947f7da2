"""Collectives between ranks of which some are threads of this process, others on other machines.

Ranks of one machine meet in its memory. Of each machine one rank, the *port* of the group, sends to
the others. Where a token is recorded, what crosses is a step that every replay takes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cpu.kernels.call_log import take_step
from engine.distributed.process_comm import ProcessCommunicator

if TYPE_CHECKING:
    from engine.forward.communicator import Communicator, Group
    from engine.forward.ops import FusedAllReduce


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

    def seat(self, rank: int) -> int:
        """Return the number of a rank among those of its machine."""
        return rank - self.local.start

    def parts(self, group: Group) -> tuple[Group, Group]:
        """Return the seats of a group's members that are here, and the machines of all members."""
        found = self._known.get(group)
        if found is None:
            here = tuple(self.seat(rank) for rank in group if rank in self.local)
            machines = tuple(sorted({self._machine_of[rank] for rank in group}))
            found = self._known[group] = here, machines
        return found


class MachineCommunicator:
    """Communicator of a rank beside which others are on other machines; see `Communicator`.

    Args:
        inner: communicator with the ranks of this machine, which go by their seats.
        far_for: returns a communicator with the other machines, whose ranks are machines, for
            calls of one kind.
        layout: numbers of the machines' ranks.
        abroad: seats of the ranks that wait for another machine, kept up here.

    Attributes:
        rank: number of the rank.
    """

    def __init__(
        self,
        inner: Communicator,
        far_for: Callable[..., ProcessCommunicator],
        layout: RankLayout,
        abroad: set[int],
    ) -> None:
        self._seat = inner.rank
        self.rank = layout.local[inner.rank]
        self._inner, self._layout, self._abroad = inner, layout, abroad
        self._far_for = far_for
        self._fars: dict[object, ProcessCommunicator] = {}

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s + sum(far.waited_s for far in self._fars.values())

    def _far(self, *group: object) -> ProcessCommunicator:
        """Return the communicator with the other machines for calls of one kind."""
        if group not in self._fars:
            self._fars[group] = self._far_for(*group)
        return self._fars[group]

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        here, machines = self._layout.parts(group)
        if len(machines) == 1:
            return self._inner.all_reduce(x, here, shape)
        far = self._far("sum", group)
        if len(machines) == len(group):
            return self._repeated(lambda: far.all_reduce(x, machines, shape))
        assert shape is not None, "layers know the shape of what they sum"
        return self._repeated(lambda: self._sum(x, here, machines, shape, far))

    def _sum(
        self, x: Tensor | None, here: Group, machines: Group, shape: Sequence[int],
        far: ProcessCommunicator,
    ) -> Tensor:  # fmt: skip
        """Return the sum over all machines' ranks, in the order of the ranks."""
        joined = self._inner.gather(x, here)
        total = None
        if self._seat == here[0]:
            parts = () if joined is None else torch.split(joined, shape[-1], -1)
            total = far.sum_of_several(parts, machines)
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
            return self._inner.broadcast(x, self._layout.seat(source), here, shape)
        origin = self._layout.machine_of(source)
        port = self._layout.seat(source) if origin == self._layout.number else here[0]
        if self._seat == port:
            far = self._far("broadcast", source, group)
            x = self._crossed(x, far, origin, machines, shape)
        return (
            x if len(here) == 1 and x is not None else self._inner.broadcast(x, port, here, shape)
        )

    def _crossed(
        self, x: Tensor | None, far: ProcessCommunicator, origin: int, machines: Group,
        shape: Sequence[int] | None,
    ) -> Tensor:  # fmt: skip
        """Send x to other machines, or receive it; return it."""
        if origin != self._layout.number:
            return self._repeated(lambda: far.broadcast(None, origin, machines, shape))
        assert x is not None, "the source must have a value"
        take_step(lambda: _drop(far.broadcast(x, origin, machines, shape)))
        return x

    def _repeated(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` makes now; each replay writes what it makes then there."""
        rooms: list[Tensor] = []

        def step() -> None:
            self._abroad.add(self._seat)
            try:
                found = compute()
            finally:
                self._abroad.discard(self._seat)
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
