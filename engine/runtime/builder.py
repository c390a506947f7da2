"""Makes the ranks of a runtime: their slices of the file, caches, and what they compute with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine.cpu.worker import Worker
from engine.errors import Cancelled, EngineError, KernelError
from engine.forward.cache import Cache
from engine.forward.context import Context
from engine.hardware.backend_choice import kernels_for, use_interpreter
from engine.links.proof import find_routes
from engine.models.declare import Declaration, declare
from engine.parallel.thread_comm import ThreadCommunicator, ThreadGroup
from engine.planning.footprint import x_bytes
from engine.planning.plan import Plan, keeps_kv_on_host
from engine.runtime.loader import Progress, load_rank
from engine.runtime.micro_batches import MicroBatches, TakesTurns
from engine.runtime.rank import Rank, make_ops, warm_rows

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.forward.state import State
    from engine.gguf import GGUFFile
    from engine.gpu.card import Card
    from engine.runtime.runtime import Runtime


class RankBuilder:
    """Makes the ranks of a runtime, each on its own thread."""

    def __init__(
        self, runtime: Runtime, file: GGUFFile, params: LoadParams, declaration: Declaration
    ) -> None:
        self.file = file
        self._runtime, self._params, self._declaration = runtime, params, declaration

    def empty(self, number: int) -> Rank:
        """A rank without weights and with a cache that has no layers."""
        first = self._declaration
        return self._opened(number, first if number == 0 else declare(self.file, self._params), ())

    def loaded(self, number: int, progress: Progress) -> Rank:
        """A rank that has all it needs."""
        first = self._declaration
        mine = first if number == 0 else declare(self.file, self._params)
        rank = self._opened(number, mine, mine.states)
        try:
            with self._compiled(rank, progress):
                load_rank(
                    self.file, rank.slots, number, rank.device, rank.storage, rank.worker, progress,
                    rank.card,
                )  # fmt: skip
        except BaseException:
            rank.close()
            raise
        return rank

    @contextmanager
    def _compiled(self, rank: Rank, progress: Progress) -> Iterator[None]:
        """Compile a GPU's kernels meanwhile; they are there at the end."""
        if rank.card is None or not rank.card.compiles:
            yield
            return
        name = self._runtime.plan.devices[rank.number].device
        with _explained(name):
            compiling = rank.card.compile_ahead(
                declare(self.file, self._params), rank.number, self._params,
                warm_rows(min(self._runtime.n_ctx, self._runtime.n_batch)),
                lambda doing: progress.note(rank.number, doing),
            )  # fmt: skip
        try:
            yield
            with _explained(name):
                compiling.wait(progress.is_cancelled)
        finally:
            compiling.cancel()

    def _opened(self, number: int, declaration: Declaration, states: Iterable[State]) -> Rank:
        runtime = self._runtime
        device, storage = runtime.devices[number], runtime.plan.devices[number].storage
        cache = Cache(
            states, number, runtime.n_ctx, self._params.kv_type, device,
            kv_on_host=keeps_kv_on_host(self._params, device.type),
        )  # fmt: skip
        worker, card = self._computing_with(number, storage == "kernels")
        comm = runtime.group.communicator(number, device)
        if card is not None and isinstance(comm, ThreadCommunicator):
            comm = card.cutting(comm)
        kinds = runtime.kinds

        def make_context() -> Context:
            return Context(comm, make_ops(worker, card), cache, device, kinds)

        micro_batches = (
            MicroBatches(comm, make_context) if card and isinstance(comm, TakesTurns) else None
        )
        return Rank(declaration, storage, make_context(), worker, card, micro_batches)

    def _computing_with(self, number: int, has_kernels: bool) -> tuple[Worker | None, Card | None]:
        """What a rank computes with; an idle one as the others do, for they may repeat tokens."""
        runtime, device = self._runtime, self._runtime.devices[number]
        is_idle = number not in self._declaration.split.holders
        name = "cpu" if is_idle else runtime.plan.devices[number].device
        kernels = kernels_for(name) if has_kernels or is_idle else ""
        n_bytes = x_bytes(runtime.hp)
        if kernels == "cpu":
            return Worker(1 if is_idle else runtime.threads_per_rank, n_bytes), None
        if kernels == "gpu" and not is_idle:
            if device.type == "cpu":
                use_interpreter()
            from engine.gpu.card import Card  # Triton is not for the CPU

            return None, Card(device, n_bytes)
        return None, None


def make_group(plan: Plan, devices: Sequence[torch.device], params: LoadParams) -> ThreadGroup:
    """Where the ranks of a model meet.

    Where all of them compute with kernels for GPUs, nobody's host waits for a device there.

    Args:
        devices: of the ranks.
    """
    used = [d for d in plan.devices if d.memory.total]
    has_kernels = all(d.storage == "kernels" for d in used)
    if len(used) < 2 or not has_kernels or {kernels_for(d.device) for d in used} != {"gpu"}:
        return ThreadGroup(is_awake=sum(d.storage == "kernels" for d in plan.devices) > 1)
    if "cpu" in {d.device for d in used}:
        use_interpreter()
    from engine.gpu.comm.communicator import device_group

    return device_group(devices, find_routes([d.device for d in used], params.p2p))


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """Say of what goes wrong with kernels that it is that, and where.

    Raises:
        KernelError: for other errors but a wish to stop.
    """
    try:
        yield
    except Cancelled:
        raise
    except EngineError as error:
        raise KernelError(device, str(error).rstrip(".")) from error
