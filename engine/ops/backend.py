"""The reference backend: torch in F32 over dequantised, or packed, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from engine.ops.file_bytes import Bytes, copied
from engine.ops.reference import REFERENCE, ReferenceOps

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.communicator import Communicator
    from engine.forward.weight import Weight
    from engine.gguf import GGUFFile
    from engine.layers.module import Slot
    from engine.sharding.placement import Slices


class NothingToCompile:
    """The compilation of a backend whose kernels are ready when they are first started."""

    def wait(self, is_cancelled: object) -> None:
        """Return at once."""

    def cancel(self) -> None:
        """Do nothing."""


class PlainLoader:
    """Copies bytes of the file; holds no matrices in a form for kernels.

    Args:
        report: called with the bytes of the file that were read; may raise to stop.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def bring(self, raw: Bytes) -> Tensor:
        """Copy bytes of the file into memory of their own."""
        return copied(raw, self.report)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Fail: only ranks with kernels hold weights for them."""
        raise AssertionError(f"{slot.tensor.name} is for kernels, and there are none")


class ReferenceBackend:
    """See `engine.runtime.backend.Backend`; nothing is compiled, recorded or captured."""

    records = captures = compiles = False
    memory: Sequence[Tensor] = ()
    kernel_s: float | None = None
    waited_s = 0.0

    def make_ops(self) -> ReferenceOps:
        return REFERENCE

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[PlainLoader]:
        yield PlainLoader(report)

    def compile_ahead(self, *_: object) -> NothingToCompile:
        return NothingToCompile()

    def adopt(self, value: Weight | Tensor) -> Weight | Tensor:
        return value

    def captured_collectives(self, comm: Communicator) -> Communicator:
        return comm

    def recorder(self, keeps: Sequence[Tensor]) -> None:
        return None

    def capture(self, compute: object) -> NoReturn:
        raise AssertionError("only GPUs capture")

    def prepare(self) -> None:
        """Do nothing: no choice depends on a measurement."""

    def forget(self) -> None:
        """Do nothing: no activations are kept."""

    def release(self) -> None:
        """Do nothing: there is no working memory."""

    def close(self) -> None:
        """Do nothing: there are no threads."""
