"""A loaded model on its ranks: one forward pass at a time, and what it takes in memory."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend import refuse_kernels, repeats_tokens
from engine.control import Direction, read_control_vectors
from engine.errors import EngineError, KernelError, OutOfDeviceMemory
from engine.events import DeviceMemory
from engine.layers.state import RecurrentState
from engine.loader import Progress, check_types
from engine.machine import (
    busy_on_cpu,
    free_bytes,
    is_out_of_memory,
    prove_kernels,
    release_reserves,
    threads_per_rank,
    torch_devices,
)
from engine.models.declare import declare
from engine.opener import Opener
from engine.ops.weights import release_scratch
from engine.ops.worker import Worker
from engine.parallel.comm import ThreadGroup
from engine.parallel.pool import RankPool
from engine.plan import DevicePlan, Plan, make_plan
from engine.rank import Rank, warm_rows
from engine.resident import ResidentPeak, resident_bytes
from engine.resplit import DOING, Side, Transfer

if TYPE_CHECKING:
    from engine.callbacks import IsCancelled, ProgressSink
    from engine.config import LoadParams
    from engine.gguf import GGUFFile
    from engine.layers.hparams import HParams
    from engine.session import TokenSource

log = logging.getLogger(__name__)

Logits = NDArray[np.float32]
T = TypeVar("T")

RECORDED = 2
"""Which of the tokens that are computed singly is recorded."""


class Runtime:
    """All ranks of one model.

    Args:
        on_progress: called from several threads, one at a time.
        is_cancelled: asked between chunks of weights.
        donor: a runtime of the same file with another split, from which this one takes weights and
            the first `n_past` positions of the cache. It is closed, or if this one fails, goes on
            as before.

    Attributes:
        ranks: in rank order; empty once closed.
        n_threads: CPU threads of all ranks together.
        threads_per_rank: of each of them.
        group: where ranks that are threads of this process meet.
        stream: draws tokens where they are computed; None where the host draws all.

    Raises:
        EngineError: the file, the split or a device cannot be used; nothing stays allocated.
    """

    def __init__(
        self,
        file: GGUFFile,
        params: LoadParams,
        on_progress: ProgressSink,
        is_cancelled: IsCancelled,
        donor: Runtime | None = None,
        n_past: int = 0,
    ) -> None:
        declaration = declare(file, params)
        check_types(str(file.path), declaration.slots)
        self.hp = declaration.hp
        holders = declaration.split.holders
        self.devices = torch_devices(declaration.devices, holders)
        self.directions: Mapping[int, Direction] = (
            _directions(params, self.hp) if donor is None else donor.directions
        )
        notes = prove_kernels(declaration.devices[rank] for rank in holders)
        free = free_bytes(["cpu", *(declaration.devices[rank] for rank in holders)])
        if donor is not None:
            free = donor.returned(free)
        plan = make_plan(declaration, params, free)
        self.plan: Plan = replace(plan, warnings=(*plan.warnings, *notes))
        self.plan.check_fits(free)
        self.n_ctx = self.plan.n_ctx
        self.n_batch = params.n_batch
        self.can_rewind = not any(isinstance(s, RecurrentState) for s in declaration.states)
        self.ranks: list[Rank] = []
        self.stream: TokenSource | None = None
        self._n_single = 0
        self._resident: ResidentPeak | None = None
        self._cached_at_load = 0
        self._allocated_at_load: dict[str, int] = {}
        self._start_threads(params)
        opener = Opener(self, file, params, declaration)
        try:
            if donor is None:
                self._load(opener, on_progress, is_cancelled)
            else:
                self._take_over(donor, n_past, opener, on_progress, is_cancelled)
        except BaseException:
            self.close()
            raise
        self._watch_memory()

    def _start_threads(self, params: LoadParams) -> None:
        self.threads_per_rank = threads = threads_per_rank(params.cpu_threads, self.plan)
        self.n_threads = threads * max(1, len(busy_on_cpu(self.plan)))
        n_native = sum(d.storage == "kernels" for d in self.plan.devices)
        self.group = ThreadGroup(is_awake=n_native > 1)
        self._pool = RankPool(  # it must not know this object, which ends it when it is dropped
            len(self.devices), self.group.abort, lambda: torch.set_num_threads(threads), self.group
        )
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def workers(self) -> list[Worker]:
        """What the ranks on the CPU compute with that use its kernels."""
        return [rank.worker for rank in self.ranks if rank.worker]

    @property
    def _has_kernels(self) -> bool:
        return any(rank.worker or rank.card for rank in self.ranks)

    def _load(self, opener: Opener, on_progress: ProgressSink, is_cancelled: IsCancelled) -> None:
        stop = threading.Event()
        progress = Progress(
            self.plan.file_bytes, on_progress, lambda: stop.is_set() or is_cancelled()
        )

        def load(number: int) -> Rank:
            try:
                return opener.loaded(number, progress)
            except BaseException:
                stop.set()
                raise

        self.ranks = self._run(load, "to load the model")
        self._steer()
        self._warm_up()
        self._draw_on_device(0)

    def _steer(self) -> None:
        """Show the ranks what control vectors add."""
        for rank in self.ranks:
            rank.context.directions = {
                layer: torch.from_numpy(direction).to(rank.device)
                for layer, direction in self.directions.items()
            }

    def _warm_up(self) -> None:
        """Compile, record and measure now what the first tokens and the first prompt wait for."""
        if not self._has_kernels:
            return
        for _ in range(RECORDED):
            self._pass([0], 0, 0)
        if any(rank.card and rank.card.compiles for rank in self.ranks):
            for n in warm_rows(min(self.n_ctx, self.n_batch)):
                self._pass([0] * n, 0, n - 1)
        for worker in self.workers:
            worker.prepare()

    def _take_over(
        self, donor: Runtime, n_past: int, opener: Opener,
        on_progress: ProgressSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        """Become what `donor` is, on other ranks; there is no pass that its cache would lose."""
        if donor.stream is not None:
            donor.stream.stop()
            donor.stream = None
        self.ranks = self._run(opener.empty, DOING)
        transfer = Transfer(
            opener.file, donor._side(), self._side(), n_past, on_progress, is_cancelled
        )
        try:
            transfer.run()
            self._steer()
            for worker in self.workers:
                worker.prepare()
        except BaseException as error:
            donor._take_back(transfer, error)
            raise
        donor.close()

    def _draw_on_device(self, n_past: int) -> None:
        """Have tokens drawn where they are computed, if one GPU does all.

        Args:
            n_past: cached tokens, which stay; recurrent states may become others.
        """
        if self.stream is not None or n_past >= self.n_ctx or not repeats_tokens():
            return
        if len(found := [rank for rank in self.ranks if rank.card and rank.is_alone]) == 1:
            self.stream = found[0].token_stream(self.hp.n_vocab, n_past, can_rewind=self.can_rewind)

    def _side(self) -> Side:
        return Side(self.ranks, lambda fn: self._run(fn, DOING))

    def _take_back(self, transfer: Transfer, error: BaseException) -> None:
        """Have again what was given away in vain."""
        self._forget_recordings()
        try:
            transfer.undo()
        except BaseException:  # noqa: BLE001 the first failure is the one to tell
            self.close()
            if isinstance(error, EngineError):
                error.hint = "The old split could not be restored either: load the model again."

    def returned(self, free: Mapping[str, int]) -> dict[str, int]:
        """Free memory by device, once what this model holds is free as well."""
        total = dict(free)
        for rank in self.ranks:
            held, device = rank.held, str(rank.device)
            for name, n_bytes in ((device, held.weights + held.kv), ("cpu", held.host_kv)):
                if name in total:
                    total[name] += n_bytes
        return total

    def forward(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones.

        Args:
            first_logit: index into `ids` of the first token whose logits are wanted.

        Returns:
            (len(ids) - first_logit, n_vocab)

        Raises:
            EngineError: the model was closed, a device ran out of memory or a rank was lost; what
                the cache holds from `n_past` on is then undefined.
        """
        if not self.ranks:
            raise EngineError("The model has been unloaded.", "Load it again.")
        return self._pass(ids, n_past, first_logit)

    def _pass(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        step = self._step(ids, n_past, first_logit)
        found = self._run(step, "to compute the next tokens", is_watched=True)
        (logits,) = (x for x in found if x is not None)
        if len(ids) > 1 and self._resident:  # reading it costs as much as a small model's token
            self._resident.note()
        result: Logits = logits.cpu().numpy()
        if len(ids) == 1 and self._n_single == RECORDED and self.can_rewind:
            self._draw_on_device(n_past + 1)  # a state that cannot go back must not try it
        return result

    def _step(
        self, ids: Sequence[int], n_past: int, first_logit: int
    ) -> Callable[[int], Tensor | None]:
        """What each rank does: single tokens are recorded once and then repeated."""
        ranks, whole = self.ranks, torch.tensor(ids)
        if len(ids) > 1 or first_logit or not self._has_kernels:
            return lambda rank: ranks[rank].compute(whole, n_past, first_logit)
        self._n_single += repeats_tokens()
        if all(rank.recording for rank in ranks):
            return lambda rank: ranks[rank].repeat(ids[0], n_past)
        if self._n_single == RECORDED:
            return lambda rank: ranks[rank].record(ids[0], n_past)
        return lambda rank: ranks[rank].compute(whole, n_past, 0)

    def _forget_recordings(self) -> None:
        self._n_single = 0
        self.stream = None
        for rank in self.ranks:
            rank.recording = None

    def kernel_s(self) -> list[float] | None:
        """Seconds that each rank has spent in kernels so far; None if one has none, or no clock."""
        found = [worker.team.kernel_s for worker in self.workers]
        known = [seconds for seconds in found if seconds is not None]
        return known if len(known) == len(self.devices) else None

    def save_recurrent(self) -> None:
        """Keep a copy of all recurrent states as they are now."""
        self._run(lambda rank: self.ranks[rank].context.cache.save(), "to keep a state")

    def restore_recurrent(self) -> None:
        """Go back to the copy of the recurrent states."""
        self._run(lambda rank: self.ranks[rank].context.cache.restore(), "to go back to a state")

    def _run(self, fn: Callable[[int], T], doing: str, *, is_watched: bool = False) -> list[T]:
        """Run on all ranks; failures to allocate become a sentence.

        Args:
            is_watched: ranks never rest for long in it. If one is lost, the model is closed.
        """

        def guarded(rank: int) -> T:
            try:
                with torch.inference_mode():
                    return fn(rank)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise self._out_of_memory(rank, doing) from None

        self._set_threads()
        try:
            return self._pool.run(guarded, is_watched=is_watched)
        except BaseException:
            self._forget_recordings()  # the places where ranks meet in them are of no use now
            if self._pool.lost:
                self.close()
            raise
        finally:
            self.group.settle()

    def _set_threads(self) -> None:
        """The number is torch's own global, which another model may have changed."""
        if torch.get_num_threads() != self.threads_per_rank:
            torch.set_num_threads(self.threads_per_rank)

    def _out_of_memory(self, rank: int, doing: str) -> OutOfDeviceMemory:
        device = self.plan.devices[rank].device
        free = free_bytes([device])[device]
        needed = max(self.plan.devices[rank].memory.total, free + 1)
        return OutOfDeviceMemory(device, needed, free, doing)

    def memory(self) -> list[DeviceMemory]:
        """Bytes of each rank.

        Measured weights and KV cache are the sizes of their tensors. Measured compute is the peak
        beyond those since the load (on CUDA the allocator's, on the CPU the growth of this
        process without what is new of the KV cache), divided among the ranks of a device in
        proportion to what was predicted.
        """
        result = []
        for plan, rank in zip(self.plan.devices, self.ranks, strict=True):
            compute = plan.memory.compute
            if compute:  # a GPU without a share must not be asked
                compute *= self._measured_compute(plan.device)
                compute //= sum(d.memory.compute for d in self._on(plan.device))
            measured = replace(rank.held, compute=compute)
            result.append(DeviceMemory(plan.device, plan.memory, measured))
        return result

    def _on(self, device: str) -> list[DevicePlan]:
        return [d for d in self.plan.devices if d.device == device]

    def _watch_memory(self) -> None:
        """Begin to measure what is taken beyond weights and cache."""
        release_reserves(self.devices)
        self._resident, self._cached_at_load = ResidentPeak(), self._cached_bytes()
        for device in {d for d in self.devices if d.type == "cuda"}:
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated_at_load[str(device)] = torch.cuda.memory_allocated(device)

    def _measured_compute(self, device: str) -> int:
        """Bytes of all ranks on a physical device together."""
        if device == "cpu":
            assert self._resident is not None, "it is made at the end of a load"
            return max(0, self._resident.growth - self._cached_bytes() + self._cached_at_load)
        return int(torch.cuda.max_memory_allocated(device)) - self._allocated_at_load[device]

    def _cached_bytes(self) -> int:
        """Of the caches in the host's memory, what was used so far: it is given by the page."""
        tensors = [x for r in self.ranks for layer in r.context.cache.layers for x in layer.held()]
        return sum(
            resident_bytes(x.data_ptr(), x.nbytes) for x in tensors if x.device.type == "cpu"
        )

    def close(self) -> None:
        """Free everything; safe to call twice.

        What a lost rank uses is freed when its thread comes back.
        """
        self._finalizer()
        self.stream = None
        for rank in self.ranks:
            if rank.number not in self._pool.lost:
                rank.close()
        self.ranks.clear()  # what a lost rank was told to do knows this list as well
        release_scratch()
        release_reserves(self.devices)


def open_runtime(
    file: GGUFFile, params: LoadParams, on_progress: ProgressSink, is_cancelled: IsCancelled,
    donor: Runtime | None = None, n_past: int = 0,
) -> Runtime:  # fmt: skip
    """A `Runtime`; without the kernels of a GPU where they cannot be compiled after all."""
    while True:
        try:
            return Runtime(file, params, on_progress, is_cancelled, donor, n_past)
        except KernelError as error:
            log.warning("%s", error)
            refuse_kernels(error.device, error.why)


def _directions(params: LoadParams, hp: HParams) -> Mapping[int, Direction]:
    """What the control vectors add after each layer."""
    return read_control_vectors(
        params.control_vectors, params.control_layers, hp.n_embd, hp.n_layer
    )
