"""A loaded model on its ranks: one forward pass at a time, and what it takes in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache import KVCache
from engine.context import Context
from engine.devices import cuda_status, require_devices
from engine.devices.host import usable_cores
from engine.errors import Cancelled, EngineError, NoDevice, OutOfDeviceMemory
from engine.events import DeviceMemory, LoadProgress, MemoryUse
from engine.loader import Progress, check_types, load_rank
from engine.models.declare import Declaration, declare
from engine.ops.reference import ReferenceOps
from engine.parallel.comm import ThreadCommunicator, ThreadGroup
from engine.parallel.pool import RankPool
from engine.plan import Plan, make_plan

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.gguf import GGUFFile
    from engine.models.base import CausalLM

Logits = NDArray[np.float32]
T = TypeVar("T")

SMALL_BYTES = 64 << 20
"""Weights of a rank up to this size stay in the caches of one core's neighbourhood."""


class Runtime:
    """All ranks of one model.

    Args:
        on_progress: called from several threads, one at a time.
        is_cancelled: asked between chunks of weights.

    Raises:
        EngineError: the file, the split or a device cannot be used; nothing stays allocated.
    """

    def __init__(
        self,
        file: GGUFFile,
        params: LoadParams,
        on_progress: Callable[[LoadProgress], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        declaration = declare(file, params)
        check_types(str(file.path), declaration.slots)
        self.hp = declaration.hp
        self.devices = [torch_device(name) for name in declaration.devices]
        free = free_bytes(declaration.devices)
        self.plan: Plan = make_plan(declaration, params, free)
        self.plan.check_fits(free)
        self.n_ctx = self.plan.n_ctx
        self.n_batch = params.n_batch
        self._group = ThreadGroup(len(self.devices))
        self._models: list[CausalLM | None] = [None] * len(self.devices)
        self.contexts: list[Context | None] = [None] * len(self.devices)
        self._held: list[MemoryUse] = [MemoryUse()] * len(self.devices)
        threads = threads_per_rank(params.cpu_threads, self.plan)
        torch.set_num_threads(threads)
        self._pool = RankPool(
            len(self.devices), self._group.abort, lambda: torch.set_num_threads(threads)
        )
        try:
            self._load(file, params, declaration, on_progress, is_cancelled)
        except BaseException:
            self.close()
            raise
        self._resident_at_load = _resident_bytes()
        self._resident_peak = self._resident_at_load

    def _load(
        self,
        file: GGUFFile,
        params: LoadParams,
        declaration: Declaration,
        on_progress: Callable[[LoadProgress], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        stop = threading.Event()
        progress = Progress(
            self.plan.file_bytes, on_progress, lambda: stop.is_set() or is_cancelled()
        )

        def load(rank: int) -> None:
            mine = declaration if rank == 0 else declare(file, params)
            device = self.devices[rank]
            try:
                held = load_rank(file, mine.slots, rank, device, self.plan.storage, progress)
                cache = KVCache(self.hp, mine.split, rank, self.n_ctx, params.kv_type, device)
            except BaseException:
                stop.set()
                raise
            comm = ThreadCommunicator(self._group, rank, device)
            self._models[rank] = mine.model
            self.contexts[rank] = Context(comm, ReferenceOps(), cache, device)
            self._held[rank] = MemoryUse(weights=held, kv=cache.n_bytes)

        self._run(load, "to load the model")

    def forward(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones.

        Args:
            first_logit: index into `ids` of the first token whose logits are wanted.

        Returns:
            (len(ids) - first_logit, n_vocab)

        Raises:
            EngineError: a device ran out of memory or a rank was lost; what the cache holds from
                `n_past` on is then undefined.
        """
        whole = torch.tensor(ids)

        def step(rank: int) -> Tensor | None:
            model, ctx = self._models[rank], self.contexts[rank]
            assert model is not None, "the model was closed"
            assert ctx is not None, "the model was closed"
            ctx.begin(n_past, len(ids), first_logit)
            return model.forward(whole.to(ctx.device), ctx)

        for logits in self._run(step, "to compute the next tokens"):
            if logits is not None:
                if len(ids) > 1:  # reading it costs as much as a small model's token
                    self._resident_peak = max(self._resident_peak, _resident_bytes())
                result: Logits = logits.cpu().numpy()
                return result
        raise AssertionError("no rank holds the output head")

    def _run(self, fn: Callable[[int], T], doing: str) -> list[T]:
        """Run on all ranks; failures to allocate become a sentence."""

        def guarded(rank: int) -> T:
            device = self.devices[rank]
            try:
                with torch.inference_mode():
                    return fn(rank)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                raise self._out_of_memory(rank, device, doing) from None

        try:
            return self._pool.run(guarded)
        finally:
            self._group.reset()

    def _out_of_memory(self, rank: int, device: torch.device, doing: str) -> OutOfDeviceMemory:
        predicted = self.plan.devices[rank].memory
        free = free_bytes([str(device)])[str(device)]
        return OutOfDeviceMemory(str(device), max(predicted.total, free + 1), free, doing)

    def memory(self) -> list[DeviceMemory]:
        """Bytes of each rank.

        Measured weights and KV cache are the sizes of their tensors. Measured compute is the peak
        beyond those: on CUDA the allocator's, on the CPU the growth of this process since the
        load, divided among CPU ranks in proportion to what was predicted for them.
        """
        result = []
        for device, plan, held in zip(self.devices, self.plan.devices, self._held, strict=True):
            compute = self._measured_compute(device, plan.memory.compute, held)
            measured = MemoryUse(held.weights, held.kv, compute)
            result.append(DeviceMemory(plan.device, plan.memory, measured))
        return result

    def _measured_compute(self, device: torch.device, predicted: int, held: MemoryUse) -> int:
        if device.type == "cuda":
            return max(0, torch.cuda.max_memory_allocated(device) - held.weights - held.kv)
        on_cpu = [
            p.memory.compute
            for d, p in zip(self.devices, self.plan.devices, strict=True)
            if d.type == "cpu"
        ]
        grown = self._resident_peak - self._resident_at_load
        return grown * predicted // max(1, sum(on_cpu))

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._pool.close()
        self._models = [None] * len(self.devices)
        self.contexts = [None] * len(self.devices)
        if any(d.type == "cuda" for d in self.devices):
            torch.cuda.empty_cache()


def torch_device(name: str) -> torch.device:
    """The torch device for "cpu" or "cuda:N".

    Raises:
        NoDevice: it does not exist here.
    """
    if name == "cpu":
        return torch.device("cpu")
    require_devices([name])
    if not torch.cuda.is_available():
        raise NoDevice(name, cuda_status().rstrip(".") or "PyTorch sees no GPU")
    return torch.device(name)


def free_bytes(devices: Sequence[str]) -> Mapping[str, int]:
    """Free memory of each of `devices`."""
    free: dict[str, int] = {}
    for name in devices:
        if name == "cpu":
            free[name] = psutil.virtual_memory().available
        else:
            free[name] = torch.cuda.mem_get_info(torch.device(name))[0]
    return free


def threads_per_rank(cpu_threads: int | None, plan: Plan) -> int:
    """Threads of each rank, so that the ranks on the CPU together use what was asked.

    A small model is done sooner by one thread than by waiting for a second at every operation,
    above all on a machine that has other things to do.
    """
    on_cpu = [d for d in plan.devices if d.device == "cpu"]
    if cpu_threads is None and all(d.memory.weights < SMALL_BYTES for d in on_cpu):
        return 1
    asked = min(cpu_threads or usable_cores(), os.cpu_count() or 1)
    return max(1, asked // max(1, len(on_cpu)))


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, EngineError | Cancelled):
        return False
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in text
        or "not enough memory" in text
    )
