"""Interface of what a rank computes with: the reference, the CPU's kernels or those of GPUs.

`engine.ops.backend`, `engine.cpu.backend` and `engine.gpu.backend` implement it; which one a rank
gets is decided once, by `engine.runtime.builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from engine.config import LoadParams
    from engine.forward.communicator import Communicator
    from engine.forward.ops import Ops
    from engine.forward.recording import TokenRecorder
    from engine.forward.weight import Weight
    from engine.gguf import GGUFFile
    from engine.gpu.launch.graph import Captured
    from engine.layers.module import Slot
    from engine.models.declare import Declaration
    from engine.progress import IsCancelled
    from engine.sharding.placement import Slices


class WeightLoader(Protocol):
    """Brings parts of a file to a rank's device, in the form that its backend reads."""

    def bring(self, raw: NDArray[np.uint8]) -> Tensor:
        """Copy bytes (…, row_bytes) of the file to the device unchanged."""
        ...

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Load the parts of a matrix that the rank holds, in the form that kernels read."""
        ...


class Compilation(Protocol):
    """Kernels that are being compiled beside the load."""

    def wait(self, is_cancelled: IsCancelled) -> None:
        """Wait until all are compiled.

        Raises:
            EngineError: one does not compile, or it was cancelled.
        """
        ...

    def cancel(self) -> None:
        """Compile no more."""
        ...


class Backend(Protocol):
    """What one rank computes with, and holds its weights for.

    Attributes:
        records: tokens are recorded on the rank's own thread, see `recorder`.
        captures: tokens are captured on the device, by all ranks together, see `capture`.
    """

    records: bool
    captures: bool

    @property
    def compiles(self) -> bool:
        """Whether a kernel's first start takes longer than the others."""
        ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """Memory that kernels use beside what a pass allocates, as it is now."""
        ...

    @property
    def kernel_s(self) -> float | None:
        """Seconds spent in kernels so far; None where no clock tells."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that replayed tokens have waited for other ranks so far."""
        ...

    def make_ops(self) -> Ops:
        """Return fresh operations, without memory of what was computed before."""
        ...

    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> AbstractContextManager[WeightLoader]:
        """Return a loader of a rank's parts of `slots`; what it loaded is complete at its end.

        Args:
            report: called with the bytes of the file that were read; may raise to stop.
        """
        ...

    def compile_ahead(
        self, declare: Callable[[], Declaration], rank: int, params: LoadParams,
        row_counts: Sequence[int], note: Callable[[str], None],
    ) -> Compilation:  # fmt: skip
        """Begin to compile the kernels that passes over so many rows will start.

        Args:
            declare: declares the model once more, with modules that nobody else uses.
            note: told how far it is, as a sentence; "" at the end.
        """
        ...

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        """Return a weight of another rank on the same device, as this backend computes with it."""
        ...

    def captured_collectives(self, comm: Communicator) -> Communicator:
        """Return the same collectives as they are made inside what this backend captures."""
        ...

    def recorder(self, keeps: Sequence[Tensor]) -> TokenRecorder | None:
        """Return a recorder for one token; None where tokens are not recorded.

        Args:
            keeps: memory that operations use beside what a pass allocates.
        """
        ...

    def capture(self, compute: Callable[[], Tensor | None]) -> Captured[Tensor | None]:
        """Capture what computes a token.

        Raises:
            NotRepeatable: that cannot be.
        """
        ...

    def prepare(self) -> None:
        """Measure now what the first prompt would wait for."""
        ...

    def forget(self) -> None:
        """Drop what is kept of the last activations."""
        ...

    def release(self) -> None:
        """Free working memory."""
        ...

    def close(self) -> None:
        """End its threads; safe to call twice."""
        ...
