"""Runtime of one rank of a model whose other ranks are in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np
import torch

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
from engine.sampling.slices import (
    SliceCandidates,
    n_candidates,
    sample_gathered,
    slice_candidates,
)

if TYPE_CHECKING:
    from engine.config.load import LoadParams
    from engine.distributed.wire import Wire
    from engine.gguf.reader import GGUFFile
    from engine.runtime.rank import Rank
    from engine.sampling.sampler import Sampler
    from engine.sampling.token_source import Logits

ELSEWHERE = 1 << 60
"""Bytes assumed to be free on devices of other hosts, which check them themselves."""

STEP_BY_STEP = "ranks that are processes do not capture tokens"
"""Reason why a GPU of such a rank is slower."""

ONE_PROCESS = "Where all GPUs are in one machine, `tandem generate` is faster."
"""Sentence on what helps against that."""

DOING = "to compute the next tokens"
"""Purpose of a forward pass's memory, for errors."""


class ProcessRuntime:
    """A `Runtime` whose ranks are processes; this process computes one of them.

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
        token_source: samples all tokens but the first.
        sampling_rank: number of the rank that samples tokens.
    """

    def __init__(self, file: GGUFFile, params: LoadParams, wire: Wire) -> None:
        if params.n_batch is None:  # hosts may have more or less free memory, and must agree
            params = replace(params, n_batch=PROMPT_BATCH)
        declaration = declare(file, params)
        check_types(str(file.path), declaration.slots)
        self.number = number = wire.rank
        self.hp, self._split = declaration.hp, declaration.split
        self.n_vocab = self.hp.n_vocab
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
        self.n_ctx, self.n_batch = self.plan.n_ctx, self.plan.n_batch
        self.can_rewind = not any(isinstance(s, RecurrentState) for s in declaration.states)
        self.groups = page_groups(self.plan.cache_size, sights_of(declaration.states))
        self.wire, self.comm = wire, ProcessCommunicator(wire, self.device)
        self.sampling_rank = self._split.last_group[0]
        self.token_source = ProcessTokenSource(self)
        if kernels_for(names[number]) == "gpu":
            self.fallbacks.report("graph", [names[number]], STEP_BY_STEP, ONE_PROCESS)
        progress = ByteProgress(self.plan.file_bytes, ignore, never)
        with torch.inference_mode():
            setup = RankSetup(
                self.devices, self.kinds, self.plan, self.hp, self.n_batch, self.threads_per_rank,
                self._communicator, self.fallbacks,
            )  # fmt: skip
            self.rank = RankBuilder(setup, file, params, declaration).loaded(number, progress)
            directions = read_control_vectors(
                params.control_vectors, params.control_layers, self.hp.n_embd, self.hp.n_layer
            )
            self.rank.context.directions = {
                layer: torch.from_numpy(direction).to(self.device)
                for layer, direction in directions.items()
            }

    @property
    def ranks(self) -> Sequence[Rank]:
        """Rank of this process, as a sequence of one."""
        return (self.rank,)

    def _communicator(self, rank: int, device: torch.device) -> ProcessCommunicator:
        """Return the communicator of this process's rank."""
        assert rank == self.number, "another process has that one"
        return self.comm

    def forward(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch; return this rank's slice of the logits.

        Returns:
            (len(ids) - batch.first_logit, n), with n the number of the rank's tokens; 0 without a
            part of the output head.
        """
        context = self.rank.context
        context.is_sliced, context.head_input = True, None
        try:
            found = self._computed(ids, batch)
        finally:
            context.is_sliced = False
        if found is None:
            self.finish()
            return np.empty((len(ids) - batch.first_logit, 0), np.float32)
        with explain_faults([self.rank.device]):
            logits: Logits = found.float().cpu().numpy()
        return logits

    @property
    def n_running(self) -> int:
        """Number of tokens that are started but not computed yet: none."""
        return 0

    def finish(self) -> None:
        """Wait for the device, which other ranks' exchanges wait for anyway."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward_whole(self, ids: Sequence[int], batch: Batch) -> Logits | None:
        """Run the rows of a batch; return the logits of the whole vocabulary.

        Returns:
            (len(ids) - batch.first_logit, n_vocab) on the rank that samples; None on the others.
        """
        found = self._computed(ids, batch)
        with explain_faults([self.rank.device]):
            return None if found is None else found.cpu().numpy()

    def _computed(self, ids: Sequence[int], batch: Batch) -> torch.Tensor | None:
        """Run tokens on this rank; return its logits on its device.

        Raises:
            OutOfDeviceMemory: the rank's device is full.
            DeviceStopped: it has stopped working.
        """
        try:
            with explain_faults([self.rank.device]), torch.inference_mode():
                return self.rank.compute(torch.tensor(ids), batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            name = self.plan.devices[self.number].device
            free = free_bytes([name])[name]
            needed = max(self.plan.devices[self.number].memory.total, free + 1)
            raise OutOfDeviceMemory(name, needed, free, DOING) from None

    def gather_rows(self, mine: np.ndarray) -> Sequence[np.ndarray] | None:
        """Gather rows of equal length from all ranks of the output head.

        The hidden states that these ranks computed logits from are compared as well.

        Returns:
            The rows in rank order on the rank that samples; None on the others.
        """
        group = self._split.last_group
        if self.number not in group:
            return None
        row = torch.from_numpy(np.ascontiguousarray(mine)[None])
        alike = self.rank.context.head_input
        found = self.comm.gather(row, group, alike)
        return None if found is None else np.split(found[0].numpy(), len(group))

    def gather_logits(self, mine: np.ndarray) -> Logits | None:
        """Gather the slices of the logits from all ranks of the output head.

        Returns:
            All logits, (n_vocab,), on the rank that samples; None on the others.
        """
        group = self._split.last_group
        if self.number not in group:
            return None
        found = self.comm.gather(torch.from_numpy(mine[None]), group)
        return None if found is None else found[0].numpy()

    @property
    def first_id(self) -> int:
        """First token id of this rank's slice of the vocabulary."""
        return self._split.output.spans[self.number][0]

    def broadcast_token(self, token: int) -> int:
        """Return the token of the rank that samples, on all ranks."""
        others = [rank for rank in range(len(self.devices)) if rank != self.sampling_rank]
        word = torch.tensor([token])
        if self.number == self.sampling_rank:
            self.wire.swap([(rank, word) for rank in others], [])
        else:
            self.wire.swap([], [(self.sampling_rank, word)])
        return int(word.item())

    def move_slot(self, source: int, target: int) -> None:
        """Copy the recurrent states of a place to another one."""
        self.rank.context.cache.copy_slot(source, target)

    def close(self) -> None:
        """Free everything, and raise nothing; safe to call twice."""
        call_all(self.rank.close)


class ProcessTokenSource:
    """A `TokenSource` that samples from slices of logits and computes nothing ahead.

    Attributes:
        waited_s: seconds in which the host waited for a device; always 0.
    """

    waited_s = 0.0

    def __init__(self, runtime: ProcessRuntime) -> None:
        self._runtime = runtime
        self._sampler: Sampler | None = None
        self._never: Sequence[int] = ()

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Set the sampler and the tokens that must not come; return True, as any sampler works."""
        self._sampler, self._never = sampler, never
        return True

    def next(self, token: int, piece: Piece, n_left: int) -> int:
        """Compute a token; sample and return the one after it."""
        assert self._sampler is not None, "serve is called first"
        mine = self._runtime.forward([token], Batch((piece,), 0))[0]
        return self.sample(mine, self._sampler, self._never)

    def stop(self) -> Sequence[int]:
        """Return the tokens computed ahead: none."""
        return ()

    def sample(self, mine: Logits, sampler: Sampler, never: Sequence[int]) -> int:
        """Sample a token together with the other ranks; return the same one on all of them.

        Args:
            mine: this rank's slice of the logits, (n,).
            sampler: sampler of this rank; those of all ranks have the same history, and the one of
                `sampling_rank` decides.
            never: ids of tokens that must not come.
        """
        runtime, n = self._runtime, n_candidates(sampler, self._runtime.hp.n_vocab)
        token = -1
        if n is not None:
            own = slice_candidates(mine, runtime.first_id, sampler, n, never)
            rows = runtime.gather_rows(own.pack(n))
            if rows is not None:
                found = sample_gathered(sampler, [SliceCandidates.unpack(row) for row in rows])
                token = -1 if found is None else found
            token = runtime.broadcast_token(token)
        if token >= 0:
            return token
        logits = runtime.gather_logits(mine)
        if logits is not None:
            logits[list(never)] = -np.inf
            token = sampler.sample(logits)
        return runtime.broadcast_token(token)
