"""Replay of torch operations in recordings and captures: which ones can be replayed, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

UNFIT = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}  # fmt: skip
"""Tags of operations that cannot be replayed because they depend on the data or are random."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode for one thread, without torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: skipping torch's compiler would import it and Triton, and take seconds."""
        return False


class ReplayedOp:
    """Recorded torch operation; calling it repeats the operation and writes to the same memory."""

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
    """Return all tensors in an operation's result or arguments."""
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in tensors_of(part)] if isinstance(x, list | tuple) else []


def is_allocation(func: Any) -> bool:
    """Return whether an operation, like `empty`, only allocates memory."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("new_").startswith("empty")


def is_view(result: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation's results share memory with its arguments.

    Compares addresses because some operations return views only if possible.
    """
    memory = {x.untyped_storage().data_ptr() for x in tensors_of(list(args))}
    results = tensors_of(result)
    return bool(results) and all(x.untyped_storage().data_ptr() in memory for x in results)


def is_fit(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Return whether an operation can be replayed with other data.

    Its shapes must not depend on the data, and it must not return any data to Python.
    """
    if not tensors_of(result):
        return False
    if func is aten.index.Tensor:  # the shape depends on a boolean mask's data
        return all(x is None or x.dtype is not torch.bool for x in args[1])
    tags: list[Any] = func.tags
    return UNFIT.isdisjoint(tags)
