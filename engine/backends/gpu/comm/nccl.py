"""All-reduce of two ranks' large values with NCCL's all-gather, from one process.

NCCL's own all-reduce adds in an order that depends on the machine, so only its all-gather is used,
and each rank adds the values itself. An all-gather sends n - 1 values to each of n ranks, whereas
copies of slices send 2 (n - 1) / n. So NCCL is used only for two ranks, for which both amounts are
equal.

One call enqueues the all-gather in both ranks' streams. The last rank to arrive makes that call,
when both values are in their streams.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.comm.copies import add
from engine.backends.gpu.comm.streams import CudaQueue, DeviceEvent, Queue, Queues, new_stream
from engine.backends.gpu.launch.graph import host_step_value
from engine.errors import Sentence
from engine.hardware.fallbacks import Fallbacks
from engine.planning.memory import LINK_ROUND_BYTES

if TYPE_CHECKING:
    from engine.model.forward.communicator import Communicator, FusedAllReduce, Group

log = logging.getLogger(__name__)

N_RANKS = 2  # number of ranks for which NCCL is used
N_TRIED = 1 << 16  # elements in the trial value: more than NCCL sends in one piece
TRIAL_S = 10.0  # seconds within which a first value must arrive, once NCCL is set up

AllGather = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Queue]], None]
"""Enqueues, in each rank's queue, a step that writes all ranks' values in order to its output."""

Report = Callable[[str], None]
"""Callback with the reason for not using NCCL."""


def ignore_reason(why: str) -> None:
    """Do nothing, since the reason is in the log."""


def all_gather(
    values: Sequence[Tensor], outputs: Sequence[Tensor], queues: Sequence[Queue]
) -> None:
    """Enqueue an all-gather with NCCL (see `AllGather`), on GPUs with one rank each.

    Raises:
        RuntimeError: NCCL is missing, or does not work.
    """
    from torch.cuda import nccl

    streams = [queue.stream for queue in queues if isinstance(queue, CudaQueue)]
    nccl.all_gather(values, outputs, streams=streams)


class _Given(NamedTuple):
    """One rank's arguments for the all-gather; the value is meaningless if `is_empty`."""

    value: Tensor
    output: Tensor
    queue: Queue
    is_empty: bool


class Nccl:
    """NCCL, as shared by two ranks.

    Args:
        gather: performs the all-gather.
        report: called with the reason, as the end of a sentence, if NCCL fails.
    """

    def __init__(self, gather: AllGather = all_gather, report: Report = ignore_reason) -> None:
        self._gather = gather
        self._report = report
        self._lock = threading.Lock()
        self._given: dict[int, _Given] = {}
        self._present: Sequence[int] = ()
        self._works = True

    @property
    def works(self) -> bool:
        return self._works

    def bring(self, seat: int, given: _Given, meet: Callable[[], None]) -> Sequence[int] | None:
        """Gather both ranks' values on both ranks.

        Args:
            seat: index of the calling rank, 0 or 1.
            meet: returns once the other rank has also called it.

        Returns:
            The seats of the ranks that have a value; None, on both ranks, if NCCL failed.
        """
        with self._lock:
            self._given[seat] = given
            if len(self._given) == N_RANKS:
                self._call([self._given[k] for k in range(N_RANKS)])
                self._given = {}
        meet()
        return self._present if self._works else None

    def forget(self) -> None:
        """Drop an interrupted rank's arguments."""
        self._given = {}

    def _call(self, both: Sequence[_Given]) -> None:
        values, outputs, queues, are_empty = zip(*both, strict=True)
        self._present = [seat for seat in range(N_RANKS) if not are_empty[seat]]
        try:
            self._gather(values, outputs, queues)
        except RuntimeError as error:
            log.warning("NCCL failed; GPUs copy their values from now on: %s", error)
            self._works = False
            self._report(Sentence("it has failed ({problem})", problem=str(error)))


class NcclSums:
    """One rank's all-reduce with NCCL; both ranks make the same calls."""

    def __init__(self, shared: Nccl, queues: Queues, seat: int, meet: Callable[[], None]) -> None:
        self._shared, self._queues, self._seat, self._meet = shared, queues, seat, meet
        self._memory: Tensor | None = None

    def all_reduce(self, x: Tensor | None, out: Tensor) -> DeviceEvent | None:
        """Sum both values in rank order, rounded to BF16 like `engine.backends.gpu.comm.copies`.

        Args:
            x: this rank's value, contiguous F32; None if it has none.
            out: see `CopyCollectives.all_reduce`.

        Returns:
            See `CopyCollectives.all_reduce`; None, on both ranks, if NCCL failed.
        """
        if not self._shared.works:
            return None
        self._queues.sums.wait(self._queues.compute.record())
        given, total = None if x is None else x.view(-1), out.view(-1)
        n = len(self._buffers()[0])
        for start in range(0, len(total), n):
            part = slice(start, start + n)
            if not self._round(None if given is None else given[part], total[part]):
                return None
        return self._queues.sums.record()

    def _round(self, given: Tensor | None, total: Tensor) -> bool:
        """Sum a part of a value that fits into the buffers; return whether NCCL worked."""
        sums, n = self._queues.sums, len(total)
        own, both = self._buffers()
        value, found = own[:n], both[: N_RANKS * n].view(N_RANKS, n)
        if given is not None:
            sums.run(lambda: value.copy_(given))
        present = self._shared.bring(
            self._seat, _Given(value, found.view(-1), sums, given is None), self._meet
        )
        if present is None:
            return False
        sums.run(lambda: add([found[seat] for seat in present], total))
        return True

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Return BF16 memory for this rank's part of a value, and for both ranks' parts."""
        if self._memory is None:
            self._memory = self._queues.empty((1 + N_RANKS) * LINK_ROUND_BYTES)
        memory = self._memory.view(torch.bfloat16)
        n = len(memory) // (1 + N_RANKS)
        return memory[:n], memory[n:]


def prove(devices: Sequence[torch.device], fallbacks: Fallbacks) -> Nccl | None:
    """Set up and test NCCL for two ranks (takes seconds); on failure, report it and return None.

    The test is an all-gather of random values.
    """
    names = [str(device) for device in devices]
    queues = [CudaQueue(device, new_stream(device)) for device in devices]
    return tried(devices, queues, report=lambda why: fallbacks.report("copies", names, why))


def tried(
    devices: Sequence[torch.device], queues: Sequence[Queue], gather: AllGather = all_gather,
    report: Report = ignore_reason,
) -> Nccl | None:  # fmt: skip
    """Test NCCL on given queues; see `prove`."""
    why = _problem(devices, queues, gather)
    if not why:
        return Nccl(gather, report)
    log.warning("NCCL is not used: %s", why)
    report(why)
    return None


def _problem(devices: Sequence[torch.device], queues: Sequence[Queue], gather: AllGather) -> str:
    """Return why an all-gather of random values fails, as the end of a sentence, or ""."""
    values = [
        torch.randn(N_TRIED, generator=torch.Generator().manual_seed(seat)).bfloat16()
        for seat in range(N_RANKS)
    ]
    sent = [value.to(device) for value, device in zip(values, devices, strict=True)]
    outputs = [
        torch.zeros(N_RANKS * N_TRIED, dtype=torch.bfloat16, device=device) for device in devices
    ]
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # these were created in other streams
    try:
        gather(sent, outputs, queues)
        is_over = _all_over([queue.record() for queue in queues])
    except (RuntimeError, ImportError, AttributeError) as error:
        return str(error) or type(error).__name__
    if not is_over:
        _abandoned.append((sent, outputs))
        return Sentence("a value has not arrived within {seconds:.0f} s", seconds=TRIAL_S)
    if not all(torch.equal(output.cpu(), torch.cat(values)) for output in outputs):
        return Sentence("it returns wrong values")
    return ""


_abandoned: list[object] = []  # memory that devices may still write to


def _all_over(events: Sequence[DeviceEvent]) -> bool:
    """Wait for events; return False if they take longer than `TRIAL_S`."""
    deadline = time.monotonic() + TRIAL_S
    while not all(event.query() for event in events):
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


class HostCollectives:
    """Wrapper for a communicator that makes its collectives host steps in a captured token.

    See `engine.backends.gpu.launch.graph.host_step`.
    """

    def __init__(self, inner: Communicator) -> None:
        self.rank = inner.rank
        self._inner = inner

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        return _given(group, lambda: self._inner.all_reduce(x, group, shape))

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        if len(group) == 1:
            return self._inner.gather(x, group, alike)
        return host_step_value(lambda: self._inner.gather(x, group, alike))

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        return self._inner.one_shot(group, n)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        return _given(group, lambda: self._inner.broadcast(x, source, group, shape))


def _given(group: Group, collective: Callable[[], Tensor]) -> Tensor:
    """Return a collective's result, which every member gets; a group of one never splits."""
    if len(group) == 1:
        return collective()
    found = host_step_value(collective)
    assert found is not None, "all members of a group get a value"
    return found
