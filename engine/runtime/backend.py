"""Interface of a rank's backend: the torch reference, the CPU's kernels or the GPU's kernels.

`reference.backend`, `cpu.backend` and `gpu.backend` implement it; which one a rank
gets is decided once, by `engine.runtime.builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.gpu.launch.graph import Captured
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.cache import Cache
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.operands import Weight
    from engine.model.forward.ops import Ops
    from engine.model.forward.recording import TokenRecorder
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices
    from engine.util.progress import IsCancelled


class WeightLoader(Protocol):
    """Loader of weights from a file to a rank's device, in the form that its backend reads."""

    def copy_bytes(self, raw: TensorBytes) -> Tensor:
        """Copy bytes (…, row_bytes) of the file to the device unchanged."""
        ...

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Load the parts of a matrix that the rank holds, in the form that kernels read."""
        ...


class Compilation(Protocol):
    """Compilation of kernels that runs while weights are loaded."""

    def wait(self, is_cancelled: IsCancelled) -> None:
        """Wait until all kernels are compiled.

        Raises:
            EngineError: a kernel does not compile, or the wait was cancelled.
        """
        ...

    def cancel(self) -> None:
        """Stop compiling."""
        ...


class Backend(Protocol):
    """Kernels, working memory and weight format of one rank.

    Attributes:
        records: whether tokens are recorded on the rank's own thread, see `recorder`.
        captures: whether tokens are captured on the device, by all ranks together, see `capture`.
        has_arenas: whether matrices with the same `engine.planning.footprint.arena_key` may lie in
            one piece of memory, which is free only once all of them are.
    """

    records: bool
    captures: bool
    has_arenas: bool

    @property
    def samples(self) -> bool:
        """Whether tokens may be sampled on the device."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled at their first start."""
        ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """Tensors that kernels use beside those that a forward pass allocates, as of now."""
        ...

    @property
    def kernel_s(self) -> float | None:
        """Seconds spent in kernels so far; None where nothing measures it."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that replayed tokens have waited for other ranks so far."""
        ...

    def make_ops(self) -> Ops:
        """Return new operations, without any cached activations."""
        ...

    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> AbstractContextManager[WeightLoader]:
        """Return the loader of a rank's parts of `slots`; at its exit all loads are complete.

        Args:
            report: called with the number of file bytes that were just read; may raise to stop.
        """
        ...

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
        ...

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
        ...

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        """Return another rank's weight on the same device in this backend's form."""
        ...

    def captured_collectives(self, comm: Communicator) -> Communicator:
        """Return a communicator with the collectives of `comm`, for use inside captures."""
        ...

    def recorder(self, keeps: Sequence[Tensor]) -> TokenRecorder | None:
        """Return a recorder for one token; None where tokens are not recorded.

        Args:
            keeps: tensors that operations use beside those that a forward pass allocates.
        """
        ...

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """Capture the computation of a token.

        Raises:
            NotRepeatable: the computation cannot be captured.
        """
        ...

    def prepare(self) -> None:
        """Take the measurements for which the first prompt would otherwise wait."""
        ...

    def rest(self) -> None:
        """Send threads that wait for work to sleep: another model needs the cores."""
        ...

    def forget(self) -> None:
        """Drop cached forms of the last activations."""
        ...

    def release(self) -> None:
        """Free working memory."""
        ...

    def close(self) -> None:
        """End the backend's threads; safe to call twice."""
        ...
