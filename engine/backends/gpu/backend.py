"""A GPU's backend: Triton kernels, compiled while weights load, and captured tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.backends.cpu.thread_comm import ThreadCommunicator
from engine.backends.gpu.checks.rank_check import DryModel, check_rank, verdicts_of
from engine.backends.gpu.comm.nccl import HostCollectives
from engine.backends.gpu.decode.sampling import sampling_starts
from engine.backends.gpu.launch.configs import allows, target_of, use_target
from engine.backends.gpu.launch.graph import capture
from engine.backends.gpu.launch.kernel_launch import Compiling
from engine.backends.gpu.loading import weight_loader
from engine.backends.gpu.loading.dry_run import OpCallLog, collect_launches
from engine.backends.gpu.loading.weight_loader import Arenas
from engine.backends.gpu.ops import GpuOps
from engine.backends.reference.backend import Backend, Compilation, WeightLoader
from engine.errors import Sentence
from engine.hardware.fallbacks import Fallbacks
from engine.model.forward.recording import Captured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.backends.gpu.loading.staging import Staging
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.cache import Cache
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.operands import Weight
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices

log = logging.getLogger(__name__)


class GpuLoader(WeightLoader):
    """Loader that sends parts of a file to a GPU through staging buffers and packs matrices."""

    def __init__(self, file: GGUFFile, staging: Staging, arenas: Arenas, x_bytes: int) -> None:
        self._file = file
        self._staging = staging
        self._arenas = arenas
        self._x_bytes = x_bytes

    def copy_bytes(self, raw: TensorBytes) -> Tensor:
        """Copy bytes (…, row_bytes) from the file to the device unchanged."""
        return weight_loader.send_bytes(raw, self._staging)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Load the rank's parts of a matrix, in planes or unquantised."""
        return weight_loader.load_for_gpu(
            self._file, slot, pieces, self._staging, self._arenas, self._x_bytes
        )


class GpuBackend(Backend):
    """Backend with kernels in Triton.

    Args:
        x_bytes: bytes per quantised activation; see `engine.planning.footprint.x_bytes`.
        n_ctx: maximum number of tokens in a sequence.

    Attributes:
        fallbacks: list of what makes the model's GPUs slower; loaders add to it.
        target: properties of the GPU for which kernels are compiled.
    """

    captures = has_arenas = True

    def __init__(
        self, device: torch.device, x_bytes: int, n_ctx: int, fallbacks: Fallbacks | None = None
    ) -> None:
        self.device = device
        self.x_bytes, self._n_ctx = x_bytes, n_ctx
        self.fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self.target = target_of(device)
        self._dry: DryModel | None = None

    @property
    def samples(self) -> bool:
        return allows(self.device, "sampling")

    @property
    def compiles(self) -> bool:
        return self.target.maker != "interpreter"

    def make_ops(self) -> GpuOps:
        return GpuOps(self.device, self.x_bytes, self.fallbacks, self._n_ctx)

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[GpuLoader]:
        with weight_loader.staging_for(slots, rank, self.device, report) as staging:
            yield GpuLoader(file, staging, Arenas(slots, rank, self.device), self.x_bytes)

    def compile_ahead(
        self, declare: Callable[[], Declaration], rank: int, params: LoadParams,
        row_counts: Sequence[int], note: Callable[[str], None],
    ) -> Compilation:  # fmt: skip
        if not self.compiles:
            return Compilation()
        declaration, calls = declare(), OpCallLog()
        starts = collect_launches(declaration, rank, params, self.target, row_counts, calls)
        self._dry = DryModel(calls, declaration, rank, self.x_bytes)
        split, hp = declaration.split, declaration.hp
        n_embd = hp.n_embd if rank in split.last_group else None
        own = range(*split.output.spans[rank])
        with use_target(self.target):
            starts += sampling_starts(hp.n_vocab, own, len(split.holders), n_embd)
            if len(split.holders) > 1 and rank == split.last_group[0]:
                starts += sampling_starts(hp.n_vocab)  # for several sequences; see `RowSampler`

        def report(n_done: int, n_total: int) -> None:
            text = Sentence("Compiling kernels: {n_done} of {total}", n_done=n_done, total=n_total)
            note(text if n_done < n_total else "")

        return Compiling(self.device, starts, report)

    def check(self, file: GGUFFile, slots: Sequence[Slot], cache: Cache) -> None:
        dry, self._dry = self._dry, None
        if dry is not None:
            began = time.monotonic()
            verdicts = verdicts_of(self.device)
            n = check_rank(dry, file, slots, cache, self.device, self.fallbacks, verdicts)
            log.info(
                "%s: %d operations checked in %.2f s", self.device, n, time.monotonic() - began
            )

    def captured_collectives(self, comm: Communicator) -> Communicator:
        """Return `comm`, with host collectives splitting the captured token into several graphs."""
        return HostCollectives(comm) if isinstance(comm, ThreadCommunicator) else comm

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        return capture(self.device, compute)
