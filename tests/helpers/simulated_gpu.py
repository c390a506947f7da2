"""One rank's life on a GPU without memory: what torch's allocator would reserve for it.

The loader, the cache, the staging buffers and the forward passes are the real ones, on torch's
device "meta"; `SimulatedGpu` hands each of their allocations, in their order, to a simulation of
the allocator. Files need no data: nothing is copied from them but vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.comm import copies
from engine.backends.gpu.comm.copies import CopyCollectives, Seat
from engine.backends.gpu.comm.streams import HostQueues
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.loading import dry_run, staging, weight_loader
from engine.backends.gpu.loading.staging import Buffer, CpuCopier
from engine.backends.gpu.loading.weight_loader import pack
from engine.formats.gguf.reader import GGUFFile
from engine.formats.quants.layout import Extent
from engine.hardware.devices.topology import Place
from engine.hardware.host_memory import HostTensor
from engine.load_params import LoadParams
from engine.model.architectures.declare import Declaration, declare
from engine.model.forward.cache import Cache
from engine.model.forward.state import CacheSize
from engine.planning.memory import LINK_SETS
from engine.runtime.loader import ByteProgress, load_rank
from engine.runtime.rank import warm_rows
from tests.helpers.cuda_allocator import CachingAllocator, SegmentBlock
from tests.helpers.live_memory import LiveMemory

META = torch.device("meta")
RTX_3090 = KernelTarget("nvidia", 86, 82)


class SimulatedGpu(LiveMemory):
    """A GPU whose allocations are simulated while this is active.

    Args:
        capacity: bytes that are free for torch's allocator.

    Attributes:
        allocator: the simulated allocator.
        pool: private pool that allocations come from at the moment, such as a graph's; None for
            the usual one.
    """

    def __init__(self, capacity: float = float("inf")) -> None:
        super().__init__()
        self.allocator = CachingAllocator(capacity)
        self.pool: object = None
        self._blocks: dict[int, SegmentBlock] = {}

    def taken(self, key: int, n_bytes: int) -> None:
        self._blocks[key] = self.allocator.malloc(n_bytes, pool=self.pool)

    def freed(self, key: int) -> None:
        self.allocator.free(self._blocks.pop(key))

    def counts(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta"

    @contextmanager
    def capturing(self, pool: object) -> Iterator[None]:
        """Allocate from a graph's private pool."""
        self.pool = pool
        try:
            yield
        finally:
            self.pool = None


class _Packer:
    """The real packer, which skips shapes that it has packed before: these take the same memory."""

    def __init__(self) -> None:
        self._known: set[object] = set()

    def __call__(
        self, raw: Tensor, type_number: int, extent: Extent, out: Tensor, out_row: int = 0
    ) -> None:
        key = raw.shape, type_number, extent, out.shape
        if key not in self._known:
            self._known.add(key)
            pack(raw, type_number, extent, out, out_row)


class MetaCopier(CpuCopier):
    """Copier of buffers to a GPU without memory."""

    def buffer(self, n_bytes: int) -> Buffer:
        host = HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))
        return Buffer(host, torch.empty(n_bytes, dtype=torch.uint8, device=META))


class _MetaQueues(HostQueues):
    """Queues of a GPU without memory."""

    def empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=META)


def _skip(*_: object) -> bool:
    """Do nothing, and prevent what depends on it; a mock would keep the tensors it is given."""
    return False


class SimulatedRank:
    """One rank of a model, loaded on a simulated GPU of its own.

    Args:
        gpu: the simulated GPU; to be active until the rank is not needed any more.

    Attributes:
        declaration: declaration whose modules hold the rank's weights.
        cache: its KV cache.
    """

    def __init__(self, file: GGUFFile, params: LoadParams, rank: int, gpu: SimulatedGpu) -> None:
        self.declaration: Declaration = declare(file, params)
        self._file, self._params, self._rank, self._gpu = file, params, rank, gpu
        hp, states = self.declaration.hp, self.declaration.states
        self.cache = Cache(
            states, rank, CacheSize.asked(params, hp.n_ctx), META, kv_on_host=params.kv_on_host
        )

    def load(self) -> None:
        """Load all weights, as `RankBuilder.loaded` does."""
        x_bytes = dry_run.x_bytes(self.declaration.hp)
        with (
            mock.patch.object(staging, "copier_for", return_value=MetaCopier()),
            mock.patch.object(staging, "_fill", _skip),
            mock.patch.object(weight_loader, "pack", _Packer()),
        ):
            load_rank(
                self._file, self.declaration.slots, self._rank, META, "kernels",
                GpuBackend(META, x_bytes, self.declaration.hp.n_ctx),
                ByteProgress(0, lambda progress: None, lambda: False),
            )  # fmt: skip

    def meet(self, n_ranks: int) -> None:
        """Allocate the buffers in which GPUs exchange large values by way of host memory."""
        places: list[Place] = ["host"] * n_ranks
        places[self._rank] = "device"
        seat = Seat(self._rank, places, places, lambda offer: [offer], lambda events: None)
        stages = range(1 if n_ranks == 2 else 2)
        self._links = [
            copies._Buffers(_MetaQueues(), seat, stage)
            for stage in stages
            for _ in range(LINK_SETS)
        ]
        self._sum = CopyCollectives(_MetaQueues(), seat)
        if n_ranks > 2:
            self._sum._total(torch.float32)

    def warm_up(self, target: KernelTarget = RTX_3090) -> None:
        """Compute and capture a token as `ModelRunner.warm_up` does, and batches of all sizes."""
        self._pass(1, target)
        with self._gpu.capturing("token"):
            self._pass(1, target)
        hp = self.declaration.hp
        for n in warm_rows(min(hp.n_ctx, self._params.n_batch)):
            self._pass(n, target)
        with self._gpu.capturing("sampled token"):
            self._pass(1, target)

    def _pass(self, n: int, target: KernelTarget) -> None:
        """Compute n tokens after one that is cached, with the loaded weights and cache."""
        with (
            mock.patch.object(
                dry_run, "_held", lambda slot, *_: getattr(slot.owner, slot.attribute)
            ),
            mock.patch.object(dry_run, "Cache", return_value=self.cache),
            mock.patch.object(dry_run, "_record", _skip),
        ):
            dry_run.collect_launches(self.declaration, self._rank, self._params, target, [n])
