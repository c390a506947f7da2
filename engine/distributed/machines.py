"""The machines that run one model together, as seen by the process on one of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.distributed.machine_comm import RankLayout
from engine.distributed.process_comm import ProcessCommunicator
from engine.distributed.straight import StraightBackend, StraightGroups
from engine.distributed.wire import Orders
from engine.errors import EngineError, Sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from torch import Tensor

    from engine.distributed.wire import Wire
    from engine.model.sharding.split import ModelSplit

LOAD, UNLOAD, END = "load", "unload", "end"
"""Orders to load and unload a model, and the order to leave."""


class Machines:
    """The machines that run one model together.

    Args:
        wire: connections to the other machines.
        on_failure: called with an error that occurs mid-step, after which no machine can continue.
        backend: backend that sends directly from device memory, if there is one.

    Attributes:
        number: index of this machine; machine 0 sends the orders.
        orders: orders from machine 0.
        far: communicator between machines for use outside passes.
        straight: process groups that send from device memory, if there are any.
    """

    def __init__(
        self, wire: Wire, on_failure: Callable[[EngineError], None],
        backend: StraightBackend | None = None,
    ) -> None:  # fmt: skip
        self._wire, self._on_failure = wire, on_failure
        self.number = wire.rank
        self.orders = Orders(wire)
        self.far = ProcessCommunicator(wire, torch.device("cpu"))
        self._n_models = 0
        self.straight: StraightGroups | None = None
        if backend is not None:
            self.straight = StraightGroups(backend, wire.rank, self.names)

    def far_for(self, device: torch.device, *group: Any) -> ProcessCommunicator:
        """Return a communicator between machines, through host memory, for one group of ranks.

        Each group has its own tag, as the ranks' threads may be at different steps.

        Args:
            device: device of this machine's rank.
            group: values that identify the group, the same on all machines.
        """
        tag = zlib.crc32(repr(group).encode()) >> 2 | 1
        return ProcessCommunicator(self._wire, device, tag)

    @property
    def names(self) -> list[str]:
        """Names of the machines."""
        return [peer.name for peer in self._wire.peers]

    def hand(self, x: Tensor, source: int, goal: int) -> None:
        """Copy a tensor from one machine's memory to another's; other machines do nothing.

        Args:
            x: contiguous tensor in host memory, with the same size and type on both machines.
        """
        if source == goal:
            return
        if self.number == source:
            self._wire.swap([(goal, x)], [])
        elif self.number == goal:
            self._wire.swap([], [(source, x)])

    def announce(self, params: Mapping[str, Any], donor: int = 0) -> int:
        """Have the other machines load a model too; return the model's id.

        Args:
            params: settings of the load, as JSON.
            donor: id of the model that it replaces; 0 for none.

        Raises:
            CommError: a machine is lost.
        """
        self._n_models += 1
        self.orders.send(LOAD, self._n_models, params, donor)
        return self._n_models

    def agreed(self, problem: EngineError | None, value: Any = None) -> list[Any]:
        """Return all machines' values, provided that no machine has a problem.

        Raises:
            EngineError: this machine's problem, or else the first problem on another machine.
        """
        mine = None if problem is None else [problem.message, problem.hint]
        found = self.orders.all_gather([mine, value])
        if problem is not None:
            raise problem
        for name, (theirs, _) in zip(self.names, found, strict=True):
            if theirs is not None:
                message, hint = theirs
                raise EngineError(
                    "{machine}: {problem}", Sentence(hint), machine=name, problem=message
                )
        return [value for _, value in found]

    def close(self) -> None:
        """Stop the backend's transfers; other processes may have exited.

        If a thread hangs in the backend, this ends the process, which could not exit cleanly.
        """
        if self.straight is not None:
            self.straight.abort()
            if self.straight.is_stuck:
                os._exit(0)

    def fail(self, error: EngineError) -> None:
        """Tell the agent that this process cannot continue."""
        self._on_failure(error)


class ModelPlace:
    """One model's connection to the machines.

    Args:
        machines: connections to the other machines.
        sizes: number of ranks on each machine.
        number: id of the model, the same on all machines.

    Attributes:
        layout: assignment of rank indices to machines.
        kept: this machine's parts of saved recurrent states, by key.
    """

    def __init__(self, machines: Machines, sizes: Sequence[int], number: int) -> None:
        self.machines = machines
        self.layout = RankLayout(sizes, machines.number)
        self.kept: dict[int, list[dict[str, Tensor]]] = {}
        self.number = number

    def order(self, name: str, *values: Any) -> None:
        """Send an order about this model to all other machines.

        Raises:
            CommError: a machine is lost.
        """
        self.machines.orders.send(name, self.number, *values)

    def first_problem(self, problem: str) -> str:
        """Return the first problem on any machine, or ""; all machines call it at the same point.

        Raises:
            CommError: a machine is lost.
        """
        return next(filter(None, self.machines.orders.all_gather(problem)), "")

    def heads(self, split: ModelSplit) -> tuple[int, ...]:
        """Return the machines that have a slice of the output head."""
        return self.layout.parts(split.last_group)[1]

    def first_logit(self, split: ModelSplit) -> int:
        """Return the token id of the first logit in this machine's slice of the output head."""
        mine = next(rank for rank in split.last_group if rank in self.layout.local)
        return split.output.spans[mine][0]

    def collect(
        self, held: Tensor | None, heads: tuple[int, ...], shape: tuple[int, int] | None = None
    ) -> np.ndarray | None:
        """Join several machines' rows along the last dimension, on machine 0.

        Args:
            held: this machine's rows; None if it has none.
            heads: machines that have rows.
            shape: shape of each machine's int32 rows; None if they differ.
        """
        if shape is not None:
            joined = self.machines.far.collect(held, heads, shape, torch.int32)
            return None if joined is None else joined.numpy()
        group = heads if 0 in heads else (0, *heads)
        if self.machines.number not in group:
            return None
        found = self.machines.far.gather(held, group)
        return None if found is None or self.machines.number else found.numpy()
