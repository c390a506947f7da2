"""CPU backend: one thread pool per rank, weights in planes, recorded and replayed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from engine.backends.cpu.file_packing import FilePacker
from engine.backends.cpu.ops import CpuOps
from engine.backends.cpu.packing import load_for_kernels
from engine.backends.cpu.plain_weights import PlainWeight
from engine.backends.cpu.recorder import Recorder
from engine.backends.cpu.weights import JoinedColumns, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.backends.reference.backend import Backend, WeightLoader
from engine.backends.reference.weights import FileReader

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.model.forward.operands import Weight
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices


class CpuLoader(WeightLoader):
    """Loader that packs matrices on a rank's threads."""

    def __init__(
        self, file: GGUFFile, worker: Worker, report: Callable[[int], None], reader: FileReader
    ) -> None:
        super().__init__(report, reader)
        self._file = file
        self._packer = FilePacker(worker, report, reader)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        return load_for_kernels(self._file, slot, pieces, self._packer)

    def close(self) -> None:
        """Return unused memory to the system."""
        self._packer.memory.close()


class CpuBackend(Backend):
    """Backend with our own CPU kernels.

    Args:
        x_bytes: bytes per quantised activation; see `engine.planning.footprint.x_bytes`.
        fast_prompts: see `LoadParams`.

    Attributes:
        worker: the rank's threads and their memory for activations.
    """

    records = True

    def __init__(self, n_threads: int, x_bytes: int, *, fast_prompts: bool = False) -> None:
        self.worker = Worker(n_threads, x_bytes, fast_prompts=fast_prompts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return self.worker.memory

    @property
    def kernel_s(self) -> float | None:
        return self.worker.pool.kernel_s

    @property
    def waited_s(self) -> float:
        return self.worker.pool.waited_s or 0.0

    def make_ops(self) -> CpuOps:
        return CpuOps(self.worker.pool)

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[CpuLoader]:
        with FileReader() as reader:
            loader = CpuLoader(file, self.worker, report, reader)
            yield loader
            loader.close()

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        if isinstance(value, PlaneWeight):
            return type(value)(
                value.planes, value.type_number, value.n_rows, value.extent, self.worker
            )
        if isinstance(value, PlainWeight):
            return PlainWeight(value.data, self.worker)
        if isinstance(value, JoinedColumns):
            return JoinedColumns([self._adopt_part(part) for part in value.parts], value.widths)
        return value

    def _adopt_part(self, part: Weight) -> Weight:
        adopted = self.adopt(part)
        assert not isinstance(adopted, Tensor)
        return adopted

    def recorder(self, keeps: Sequence[Tensor]) -> Recorder:
        """Return a recorder for one token.

        Args:
            keeps: tensors that operations use, except those that forward passes allocate.
        """
        return Recorder(self.worker.pool, keeps)

    def prepare(self) -> None:
        self.worker.prepare()

    def rest(self) -> None:
        self.worker.pool.rest()

    def forget(self) -> None:
        self.worker.forget()

    def release(self) -> None:
        self.worker.release()

    def close(self) -> None:
        self.worker.close()
