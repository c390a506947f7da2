"""Reference backend: torch in F32 over dequantised or packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.reference.weights import FileReader, copied
from engine.model.forward.ops import REFERENCE, Ops

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.operands import Weight
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

    def make_ops(self) -> Ops:
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


aten = torch.ops.aten

UNFIT = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}  # fmt: skip
"""Tags of operations that cannot be replayed: they depend on the numbers, or are random."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that sees the torch operations of one thread, without torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: skipping torch's compiler would import it, and Triton, for seconds."""
        return False


class ReplayedOp:
    """Recorded torch operation; a call repeats it and writes the result to the same memory."""

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._targets = tensors_of(result)

    def __call__(self) -> None:
        results = tensors_of(self._func(*self._args, **self._kwargs))
        for target, tensor in zip(self._targets, results, strict=True):
            target.copy_(tensor)


def tensors_of(x: Any) -> list[Tensor]:
    """Return all tensors in the result or arguments of an operation."""
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in tensors_of(part)] if isinstance(x, list | tuple) else []


def is_allocation(func: Any) -> bool:
    """Return whether an operation only allocates memory, like `empty`."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("new_").startswith("empty")


def is_view(result: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation's results lie in the memory of its arguments.

    Their addresses tell: some operations return views only where they can.
    """
    memory = {x.untyped_storage().data_ptr() for x in tensors_of(list(args))}
    results = tensors_of(result)
    return bool(results) and all(x.untyped_storage().data_ptr() in memory for x in results)


def is_fit(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Return whether an operation can be replayed with other numbers.

    Its shapes must not depend on the numbers, and it must not return any of them to Python.
    """
    if not tensors_of(result):
        return False
    if func is aten.index.Tensor:  # the shape depends on the numbers of a boolean mask
        return all(x is None or x.dtype is not torch.bool for x in args[1])
    tags: list[Any] = func.tags
    return UNFIT.isdisjoint(tags)
