"""A rank's backend in plain torch, the base class of the backends with kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from engine.backends.reference.weights import FileReader, copied
from engine.model.forward.ops import REFERENCE

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.cache import Cache
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.operands import Weight
    from engine.model.forward.ops import Ops
    from engine.model.forward.recording import Captured
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices
    from engine.util.progress import IsCancelled


class Compilation:
    """Compilation of kernels while weights are loaded; the base class has no kernels."""

    def wait(self, is_cancelled: IsCancelled) -> None:
        """Wait until all kernels have been compiled.

        Raises:
            EngineError: a kernel does not compile, or the wait was cancelled.
        """

    def cancel(self) -> None:
        """Stop compiling."""


class WeightLoader:
    """Loader that reads weights from a file to a rank's device, in the backend's format.

    The base class copies the file's bytes; it has no matrices for kernels.

    Args:
        report: callback with the number of bytes read; may raise to stop.
        reader: reader of the file.
    """

    def __init__(self, report: Callable[[int], None], reader: FileReader) -> None:
        self.report = report
        self.reader = reader

    def copy_bytes(self, raw: TensorBytes) -> Tensor:
        """Copy bytes (…, row_bytes) from the file to the device unchanged."""
        return copied(raw, self.report, self.reader)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Load the rank's parts of a matrix in the kernels' format."""
        raise AssertionError(f"there are no kernels for {slot.tensor.name}")


class Backend:
    """One rank's kernels, working memory and weight format; the base class is plain torch.

    `CpuBackend` and `GpuBackend` override it; `engine.runtime.loader` decides which a rank gets.

    Attributes:
        records: whether tokens are recorded on the rank's thread; see `cpu.recorder`.
        captures: whether all ranks together capture tokens on their devices; see `capture`.
        has_arenas: whether matrices with the same `engine.planning.footprint.arena_key` may share
            a block of memory, which is freed with the last of those matrices.
    """

    records = captures = has_arenas = False

    @property
    def samples(self) -> bool:
        """Whether tokens may be sampled on the device."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled when they are first launched."""
        return False

    @property
    def memory(self) -> Sequence[Tensor]:
        """Tensors that kernels currently use, except those that forward passes allocate."""
        return ()

    @property
    def kernel_s(self) -> float | None:
        """Seconds spent in kernels so far; None if unknown."""
        return None

    @property
    def waited_s(self) -> float:
        """Seconds for which replayed tokens have waited for other ranks so far."""
        return 0.0

    def make_ops(self) -> Ops:
        """Create operations that have no cached activations."""
        return REFERENCE

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[WeightLoader]:
        """Return a loader for a rank's parts of `slots`; on exit, all loads are complete.

        Args:
            report: callback with the number of bytes read; may raise to stop.
        """
        with FileReader() as reader:
            yield WeightLoader(report, reader)

    def compile_ahead(
        self, declare: Callable[[], Declaration], rank: int, params: LoadParams,
        row_counts: Sequence[int], note: Callable[[str], None],
    ) -> Compilation:  # fmt: skip
        """Start compiling the kernels that forward passes will launch.

        Args:
            declare: returns a separate declaration of the model, with new modules.
            rank: index of the rank.
            params: parameters of the load.
            row_counts: row counts of the passes.
            note: callback with the progress as a sentence, and with "" at the end.
        """
        return Compilation()

    def check(self, file: GGUFFile, slots: Sequence[Slot], cache: Cache) -> None:
        """Compare the kernels of `compile_ahead` with torch, once.

        Kernels with wrong results are replaced and reported.

        Args:
            file: the model's file.
            slots: the model's tensors, and the attributes that contain the rank's parts of them.
            cache: the rank's empty KV cache.

        Raises:
            EngineError: no kernel computes correct results.
        """

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        """Convert another rank's weight on the same device to a weight of this backend."""
        return value

    def captured_collectives(self, comm: Communicator) -> Communicator:
        """Return a communicator with the same collectives as `comm`, for use inside captures."""
        return comm

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """Capture a token's computation.

        Raises:
            NotRepeatable: the computation cannot be captured.
        """
        raise AssertionError("only GPUs capture")

    def prepare(self) -> None:
        """Run the measurements that would otherwise delay the first prompt."""

    def rest(self) -> None:
        """Stop threads from spinning, as another model needs the cores."""

    def forget(self) -> None:
        """Drop cached activations."""

    def release(self) -> None:
        """Free working memory."""

    def close(self) -> None:
        """Stop the backend's threads; safe to call twice."""
