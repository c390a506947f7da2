"""Reference backend: torch in F32 over dequantised or packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from engine.backends.reference.file_bytes import FileReader, copied
from engine.backends.reference.ops import REFERENCE, ReferenceOps

if TYPE_CHECKING:
    from torch import Tensor

    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.weight import Weight
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices


class NothingToCompile:
    """Compilation handle of a backend that has nothing to compile ahead."""

    def wait(self, is_cancelled: object) -> None:
        """Return at once."""

    def cancel(self) -> None:
        """Do nothing."""


class PlainLoader:
    """Loader that copies bytes of the file; it makes no matrices for kernels.

    Args:
        report: callback that gets the number of bytes read from the file; may raise to stop.
        reader: reader of the file.
    """

    def __init__(self, report: Callable[[int], None], reader: FileReader) -> None:
        self.report = report
        self.reader = reader

    def copy_bytes(self, raw: TensorBytes) -> Tensor:
        """Copy bytes of the file into memory of their own."""
        return copied(raw, self.report, self.reader)

    def matrix(self, slot: Slot, pieces: Sequence[Slices]) -> Weight:
        """Raise an error: only backends with kernels hold matrices for them."""
        raise AssertionError(f"{slot.tensor.name} is for kernels, and there are none")


class ReferenceBackend:
    """Backend in plain torch; it compiles, records and captures nothing.

    See `engine.runtime.backend.Backend`.
    """

    records = captures = compiles = samples = has_arenas = False
    memory: Sequence[Tensor] = ()
    kernel_s: float | None = None
    waited_s = 0.0

    def make_ops(self) -> ReferenceOps:
        return REFERENCE

    @contextmanager
    def loader(
        self, file: GGUFFile, slots: Sequence[Slot], rank: int, report: Callable[[int], None]
    ) -> Iterator[PlainLoader]:
        with FileReader() as reader:
            yield PlainLoader(report, reader)

    def compile_ahead(self, *_: object) -> NothingToCompile:
        return NothingToCompile()

    def check(self, *_: object) -> None:
        """Do nothing: torch is the reference that others are compared with."""

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

    def rest(self) -> None:
        """Do nothing: no threads spin."""

    def forget(self) -> None:
        """Do nothing: no activations are kept."""

    def release(self) -> None:
        """Do nothing: there is no working memory."""

    def close(self) -> None:
        """Do nothing: there are no threads."""
