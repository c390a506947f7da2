"""Backend of a rank in plain torch, the base of those with kernels."""

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
    """Compilation of kernels that runs while weights are loaded; here there are none to compile."""

    def wait(self, is_cancelled: IsCancelled) -> None:
        """Wait until all kernels are compiled.

        Raises:
            EngineError: a kernel does not compile, or the wait was cancelled.
        """

    def cancel(self) -> None:
        """Stop compiling."""


class WeightLoader:
    """Loader of weights from a file to a rank's device, in the form that its backend reads.

    This one copies bytes of the file; it makes no matrices for kernels.

    Args:
        report: callback that gets the number of bytes read from the file; may raise to stop.
        reader: reader of the file.
    """

    def __init__(self, report: Callable[[int], None], reader: FileReader) -> None:
        self.report = report
        self.reader = reader

    def copy_bytes(self, raw: TensorBytes) -> Tensor:
        """Copy bytes (…, row_bytes) of the file to the device unchanged."""
        return copied(raw, self.report, self.reader)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Load the parts of a matrix that the rank holds, in the form that kernels read."""
        raise AssertionError(f"{slot.tensor.name} is for kernels, and there are none")


class Backend:
    """Kernels, working memory and weight format of one rank: here plain torch, without kernels.

    `CpuBackend` and `GpuBackend` override it; `engine.runtime.loader` decides which a rank gets.

    Attributes:
        records: whether tokens are recorded on the rank's own thread, see `cpu.recorder`.
        captures: whether tokens are captured on the device, by all ranks together, see `capture`.
        has_arenas: whether matrices with the same `engine.planning.footprint.arena_key` may lie in
            one piece of memory, which is free only once all of them are.
    """

    records = captures = has_arenas = False

    @property
    def samples(self) -> bool:
        """Whether tokens may be sampled on the device."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled at their first start."""
        return False

    @property
    def memory(self) -> Sequence[Tensor]:
        """Tensors that kernels use beside those that a forward pass allocates, as of now."""
        return ()

    @property
    def kernel_s(self) -> float | None:
        """Seconds spent in kernels so far; None where nothing measures it."""
        return None

    @property
    def waited_s(self) -> float:
        """Seconds that replayed tokens have waited for other ranks so far."""
        return 0.0

    def make_ops(self) -> Ops:
        """Return new operations, without any cached activations."""
        return REFERENCE

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[WeightLoader]:
        """Return the loader of a rank's parts of `slots`; at its exit all loads are complete.

        Args:
            report: called with the number of file bytes that were just read; may raise to stop.
        """
        with FileReader() as reader:
            yield WeightLoader(report, reader)

    def compile_ahead(
        self, declare: Callable[[], Declaration], rank: int, params: LoadParams,
        row_counts: Sequence[int], note: Callable[[str], None],
    ) -> Compilation:  # fmt: skip
        """Begin to compile the kernels that forward passes will start.

        Args:
            declare: returns another declaration of the model, with modules that nobody else uses.
            rank: number of the rank.
            params: parameters of the load.
            row_counts: numbers of rows of the passes.
            note: called with the progress as a sentence; with "" at the end.
        """
        return Compilation()

    def check(self, file: GGUFFile, slots: Sequence[Slot], cache: Cache) -> None:
        """Compare the kernels of the passes that `compile_ahead` knows of with torch, once.

        Kernels whose results differ are replaced, which is reported.

        Args:
            file: file of the model.
            slots: tensors of the model, and the attributes that hold the rank's parts of them.
            cache: cache of the rank, without any tokens.

        Raises:
            EngineError: no kernel computes the right results.
        """

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        """Return another rank's weight on the same device in this backend's form."""
        return value

    def captured_collectives(self, comm: Communicator) -> Communicator:
        """Return a communicator with the collectives of `comm`, for use inside captures."""
        return comm

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """Capture the computation of a token.

        Raises:
            NotRepeatable: the computation cannot be captured.
        """
        raise AssertionError("only GPUs capture")

    def prepare(self) -> None:
        """Take the measurements for which the first prompt would otherwise wait."""

    def rest(self) -> None:
        """Send threads that wait for work to sleep: another model needs the cores."""

    def forget(self) -> None:
        """Drop cached forms of the last activations."""

    def release(self) -> None:
        """Free working memory."""

    def close(self) -> None:
        """End the backend's threads; safe to call twice."""
