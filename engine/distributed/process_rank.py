"""One rank of a model whose other ranks are in other processes: does what rank 0 orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np
import torch

from engine.distributed.orders import Orders
from engine.distributed.process_comm import ProcessCommunicator
from engine.errors import OutOfDeviceMemory
from engine.forward.batch import Batch, Piece
from engine.forward.batch_sizes import PROMPT_BATCH
from engine.forward.state import RecurrentState, sights_of
from engine.gguf.control_vectors import read_control_vectors
from engine.hardware.backend_choice import kernels_for
from engine.hardware.faults import call_all, explain_faults
from engine.hardware.torch_devices import free_bytes, is_out_of_memory, torch_device
from engine.models.declare import declare
from engine.planning.plan import make_plan
from engine.planning.threads import threads_per_rank
from engine.progress import ignore, never
from engine.runtime.builder import RankBuilder, RankSetup
from engine.runtime.interface import page_groups
from engine.runtime.kernel_proof import prove_kernels
from engine.runtime.loader import ByteProgress, check_types
from engine.sampling.slices import SliceQuery, slice_candidates

if TYPE_CHECKING:
    from engine.config.load import LoadParams
    from engine.distributed.wire import Wire
    from engine.gguf.reader import GGUFFile
    from engine.runtime.interface import SlotState
    from engine.sampling.token_source import Logits

ELSEWHERE = 1 << 60
"""Bytes assumed to be free on devices of other hosts, which check them themselves."""

STEP_BY_STEP = "ranks that are processes do not capture tokens"
"""Reason why a GPU of such a rank is slower."""

ONE_PROCESS = "Where all GPUs are in one machine, `tandem generate` is faster."
"""Sentence on what helps against that."""

ORDERS = (
    "compute", "candidates", "logits_again", "copy_page", "clear_slot", "move_slot", "save_slot",
    "load_slot",
)  # fmt: skip
"""Methods of a rank that can be ordered."""

CLOSE = "close"
"""Order that ends the others' following."""

DOING = "to compute the next tokens"
"""Purpose of a forward pass's memory, for errors."""


class ProcessRank:
    """This process's rank of a model.

    Its methods in `ORDERS` are called with the same values on all ranks, in the same order; rank 0
    gets the result.

    Args:
        file: file of the model.
        params: parameters of the load, equal in all processes.
        wire: connections to the other ranks.

    Attributes:
        number: number of this process's rank.
        rank: rank of this process.
        kinds: kind of each rank's device; ranks of one kind compute the same bits.
        plan: placement and predicted memory of the model.
        fallbacks: list of what makes the GPU of this process slower.
        comm: communicator with the other ranks.
    """

    def __init__(self, file: GGUFFile, params: LoadParams, wire: Wire) -> None:
        if params.n_batch is None:  # hosts may have more or less free memory, and must agree
            params = replace(params, n_batch=PROMPT_BATCH)
        params = replace(params, draft="off")  # nothing guesses where ranks are processes
        declaration = declare(file, params)
        check_types(str(file.path), declaration.slots)
        self.number = number = wire.rank
        self.hp, self._split = declaration.hp, declaration.split
        names = declaration.devices
        self.devices = [torch.device(name) for name in names]
        self.device = torch_device(names[number])
        self.kinds = [peer.kind for peer in wire.peers]
        self.fallbacks = prove_kernels([names[number]])
        hosts = [peer.host for peer in wire.peers]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[number]]
        free = dict.fromkeys(names, ELSEWHERE)
        free.update(free_bytes({"cpu", names[number]}))
        self.plan = make_plan(declaration, params, free)
        local = replace(self.plan, devices=tuple(self.plan.devices[rank] for rank in here))
        local.check_fits(free)
        self.threads_per_rank = threads_per_rank(params.cpu_threads, local)
        torch.set_num_threads(self.threads_per_rank)
        self.can_rewind = not any(isinstance(s, RecurrentState) for s in declaration.states)
        self.groups = page_groups(self.plan.cache_size, sights_of(declaration.states))
        self.comm = ProcessCommunicator(wire, self.device)
        self._kept: dict[int, SlotState] = {}
        self._last: torch.Tensor | None = None
        if kernels_for(names[number]) == "gpu":
            self.fallbacks.report("graph", [names[number]], STEP_BY_STEP, ONE_PROCESS)
        progress = ByteProgress(self.plan.file_bytes, ignore, never)
        with torch.inference_mode():
            setup = RankSetup(
                self.devices, self.kinds, self.plan, self.hp, self.plan.n_batch,
                self.threads_per_rank, self._communicator, self.fallbacks,
            )  # fmt: skip
            self.rank = RankBuilder(setup, file, params, declaration).loaded(number, progress)
            directions = read_control_vectors(
                params.control_vectors, params.control_layers, self.hp.n_embd, self.hp.n_layer
            )
            self.rank.context.directions = {
                layer: torch.from_numpy(direction).to(self.device)
                for layer, direction in directions.items()
            }

    def _communicator(self, rank: int, device: torch.device) -> ProcessCommunicator:
        """Return the communicator of this process's rank."""
        assert rank == self.number, "another process has that one"
        return self.comm

    def do(self, order: str, *values: Any) -> Any:
        """Do what rank 0 orders.

        Args:
            order: one of `ORDERS`.
            values: its arguments; tuples may have become lists on the way.

        Raises:
            EngineError: this rank cannot do it, or another one is gone.
        """
        assert order in ORDERS, "rank 0 knows them"
        with explain_faults([self.device]), torch.inference_mode():
            return getattr(self, order)(*values)

    def compute(
        self, ids: Sequence[int], pieces: Sequence[Sequence[Any]], first_logit: int, *more: bool
    ) -> Logits | None:
        """Run the rows of a batch; see `PagedRuntime.forward`.

        Args:
            pieces, first_logit, more: values of a `Batch`.

        Returns:
            Logits (rows, n_vocab) of the rows from `first_logit` on, or the hidden states that the
            batch wants in their place, on rank 0.
        """
        mine = self._slice(ids, _batch(pieces, first_logit, *more))
        if first_logit < len(ids):
            return self._gathered(mine)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return None

    def candidates(
        self, token: int, piece: Sequence[Any], query: Sequence[Any]
    ) -> Sequence[np.ndarray] | None:
        """Run a token; return the top candidates of each slice of the vocabulary for the next one.

        Args:
            piece, query: values of a `Piece` and of a `SliceQuery`.

        Returns:
            Packed candidates, see `SliceCandidates`, on rank 0.
        """
        asked = SliceQuery(*query)
        self._last = self._slice([token], _batch([piece], 0))
        holders, row = self._split.last_group, None
        if self.number in holders:
            mine = np.empty(0, np.float32) if self._last is None else self._last[0].numpy()
            first = self._split.output.spans[self.number][0]
            row = torch.from_numpy(slice_candidates(mine, first, asked).pack(asked.n)[None])
        rows = self._gathered(row)
        return None if rows is None else np.split(rows[0], len(holders))

    def logits_again(self) -> Logits | None:
        """Return the logits (1, n_vocab) of the token that `candidates` ran last, on rank 0."""
        return self._gathered(self._last)

    def _slice(self, ids: Sequence[int], batch: Batch) -> torch.Tensor | None:
        """Run the rows of a batch; return this rank's slice of the result, in host memory.

        Returns:
            F32 (rows, n) of logits, or hidden states on one rank of the output head; else None.

        Raises:
            OutOfDeviceMemory: the rank's device is full.
        """
        context = self.rank.context
        context.is_sliced, context.head_input = True, None
        try:
            found = self.rank.compute(torch.tensor(ids), batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            name = self.plan.devices[self.number].device
            free = free_bytes([name])[name]
            needed = max(self.plan.devices[self.number].memory.total, free + 1)
            raise OutOfDeviceMemory(name, needed, free, DOING) from None
        finally:
            context.is_sliced = False
        return None if found is None else found.float().cpu()

    def _gathered(self, mine: torch.Tensor | None) -> np.ndarray | None:
        """Join the rows of all ranks of the output head along the last dimension, on rank 0.

        The hidden states from which these ranks computed logits are compared as well.
        """
        holders = self._split.last_group
        group = holders if 0 in holders else (0, *holders)
        if self.number not in group:
            return None
        found = self.comm.gather(mine, group, self.rank.context.head_input)
        return None if found is None or self.number else found.cpu().numpy()

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy this rank's part of a page; see `PagedRuntime`."""
        self.rank.context.cache.copy_page(group, source, target)

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a place those of an empty sequence."""
        self.rank.context.cache.reset(slot)

    def move_slot(self, source: int, target: int) -> None:
        """Copy the recurrent states of a place to another one."""
        self.rank.context.cache.copy_slot(source, target)

    def save_slot(self, slot: int, key: int, dropped: Sequence[int]) -> None:
        """Keep a copy of this rank's part of the recurrent states of a place.

        Args:
            key: number by which `load_slot` finds it.
            dropped: numbers of copies that nobody needs any more.
        """
        for old in dropped:
            del self._kept[old]
        self._kept[key] = [
            {name: held.to("cpu", copy=True) for name, held in tensors.items()}
            for tensors in self._states_of(slot)
        ]

    def load_slot(self, slot: int, key: int) -> None:
        """Make the recurrent states of a place those of a copy."""
        for tensors, saved in zip(self._states_of(slot), self._kept[key], strict=True):
            for name, held in tensors.items():
                held.copy_(saved[name])

    def _states_of(self, slot: int) -> list[dict[str, torch.Tensor]]:
        """Return this rank's recurrent states of a place, layer by layer."""
        cache = self.rank.context.cache
        states = [state for state in self.rank.states if isinstance(state, RecurrentState)]
        return [cache.tensors(state, slot) for state in states]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's recurrent states on all ranks together."""
        shapes = [
            shape
            for state in self.rank.states
            if isinstance(state, RecurrentState)
            for shape in state.whole_shapes().values()
        ]
        return 4 * sum(map(prod, shapes))

    def close(self) -> None:
        """Free everything, and raise nothing; safe to call twice."""
        call_all(self.rank.close)


def _batch(
    pieces: Sequence[Sequence[Any]], first_logit: int, wants_hidden: bool = False, *_: object
) -> Batch:
    """Return a batch of its values, whose pieces may be lists; there are no pictures."""
    made = [
        Piece(n_past, n, tuple(map(tuple, tables)), *places)
        for n_past, n, tables, *places in pieces
    ]
    return Batch(tuple(made), first_logit, wants_hidden)


def follow(rank: ProcessRank, orders: Orders) -> None:
    """Do what rank 0 orders, until it closes the model.

    Raises:
        EngineError: this rank cannot do it, or another one is gone.
    """
    while True:
        order, values = orders.receive()
        if order == CLOSE:
            return
        rank.do(order, *values)
