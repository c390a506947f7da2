"""Operations of torch as they come by `__torch_dispatch__`, to be done once more."""

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
"""Operations that would be others for other numbers."""


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of torch of one thread, without torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To have it skipped would import it, and Triton with it, which takes seconds."""
        return False


class Again:
    """An operation whose result goes where it went first."""

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._places = tensors_of(result)

    def __call__(self) -> None:
        made = tensors_of(self._func(*self._args, **self._kwargs))
        for place, tensor in zip(self._places, made, strict=True):
            place.copy_(tensor)


def tensors_of(x: Any) -> list[Tensor]:
    """All tensors among results or arguments."""
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in tensors_of(part)] if isinstance(x, list | tuple) else []


def is_allocation(func: Any) -> bool:
    """Whether it makes a tensor of no particular numbers."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("new_").startswith("empty")


def is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether results lie in the memory of what came in; some operations only do where they can."""
    memory = {x.untyped_storage().data_ptr() for x in tensors_of(list(args))}
    made = tensors_of(result)
    return bool(made) and all(x.untyped_storage().data_ptr() in memory for x in made)


def is_fit(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether it does the same with other numbers, and gives none of them to Python."""
    if not tensors_of(result):
        return False
    if func is aten.index.Tensor:  # by truth values its shape depends on them
        return all(x is None or x.dtype is not torch.bool for x in args[1])
    tags: list[Any] = func.tags
    return UNFIT.isdisjoint(tags)
