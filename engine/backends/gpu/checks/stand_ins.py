"""Arguments for checks: real weights and random numbers, in place of tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.model.forward.cache import LayerCache
from engine.model.forward.expert_rows import Groups

if TYPE_CHECKING:
    from engine.backends.gpu.checks.calls import OpCall, OpCallLog
    from engine.model.forward.ops import Ops
    from engine.model.layers.module import Slot

UNIT = 64
"""Divisor of whole random numbers, which brings them to a mean square near one."""

LEAST, LARGEST = 32, 127
"""Magnitudes of whole random numbers: none is so small that a wrong weight would not matter."""

EACH = 8
"""Elements among which one is as large as any, so that each block of activations has such a one."""

NEGATIVE = ("rate",)
"""Fields of operands that are negative in each model: exponents of what is forgotten."""


class StandIns:
    """Arguments of the operations of a dry run, as a real pass would have them.

    The dry run's modules get the weights of the rank, and so are the rank's modules from then on.

    Args:
        log: log of the dry run.
        dry: tensors of the dry run's model, and the attributes that hold its stand-ins.
        real: the same of the rank, in the same order.
        caches: keys and values of the rank's layers.
        device: device of the rank.
    """

    def __init__(
        self, log: OpCallLog, dry: Iterable[Slot], real: Iterable[Slot],
        caches: Iterable[LayerCache], device: torch.device,
    ) -> None:  # fmt: skip
        self.device = device
        self._log = log
        self._held: list[object] = []  # so that no other object gets the id of one of them
        self._objects: dict[int, object] = {}
        self._memory: dict[int, Tensor] = {}
        for mine, theirs in zip(dry, real, strict=True):
            was = getattr(mine.owner, mine.attribute)
            value = getattr(theirs.owner, theirs.attribute)
            setattr(mine.owner, mine.attribute, value)
            self._know(was, value)
        for was, cache in zip(log.context.cache.layers, caches, strict=True):
            self._know(was, cache)
        for numbers, was in log.context.indices.items():
            self._know(was, torch.tensor(numbers, device=device))
        self._generator = torch.Generator(device).manual_seed(0)

    def _know(self, was: object, value: object) -> None:
        """Note what stands for an object of the dry run."""
        self._held.append(was)
        self._objects[id(was)] = value
        if isinstance(was, Tensor) and isinstance(value, Tensor):
            self._memory[_storage(was)] = value
        if isinstance(was, JoinedColumns) and isinstance(value, JoinedColumns):
            for part, real in zip(was.parts, value.parts, strict=True):
                self._know(part, real)

    def arguments(
        self, call: OpCall, ops: Ops, *, whole: bool = False
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return arguments of a call, and those by name.

        Args:
            ops: operations that group rows by expert.
            whole: whether numbers are 64ths, such that rounding them to bytes or BF16 changes
                nothing; else they are normally distributed.
        """
        memory = dict(self._memory)

        def made(value: Any, name: str = "") -> Any:
            if id(value) in self._objects:
                return self._objects[id(value)]
            if isinstance(value, Groups):
                return ops.assign(*made(self._log.routings[id(value)][1]))[1]
            if isinstance(value, Tensor):
                x = self._tensor(value, memory, whole=whole)
                return -x.abs() if name in NEGATIVE else x
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(made, value, value._fields))
            if isinstance(value, tuple | list):
                return type(value)(map(made, value))
            return value

        return made(call.args), {name: made(value) for name, value in call.named.items()}

    def _tensor(self, like: Tensor, memory: dict[int, Tensor], *, whole: bool) -> Tensor:
        """Return a tensor with the shape and strides of one without memory."""
        key = _storage(like)
        if key not in memory:
            memory[key] = self._random(like, whole=whole)
        base = memory[key]
        offset = base.storage_offset() + like.storage_offset()
        return base.as_strided(like.shape, like.stride(), offset)

    def _random(self, like: Tensor, *, whole: bool) -> Tensor:
        """Return random numbers that fill the memory which `like` is a view of."""
        n = like.untyped_storage().nbytes() // like.dtype.itemsize
        if not like.is_floating_point():  # positions
            return torch.arange(n, dtype=like.dtype, device=self.device)
        if not whole:
            return torch.randn(n, generator=self._generator, device=self.device).to(like.dtype)
        x = torch.randint(LEAST, LARGEST + 1, (n,), generator=self._generator, device=self.device)
        x[::EACH] = LARGEST
        signs = torch.randint(0, 2, (n,), generator=self._generator, device=self.device) * 2 - 1
        return (x * signs / UNIT).to(like.dtype)


def _storage(x: Tensor) -> int:
    """Return a key that views of one tensor share."""
    key: int = x.untyped_storage()._cdata
    return key
