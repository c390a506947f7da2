"""Base of model declarations: modules that know shapes and placements of tensors, not yet values.

A model is declared once for all ranks: each layer states the shape of its tensors and their
placement on the ranks. `bind` then finds the tensors in a file. From there on, the planner counts
bytes and the loader fills the attributes of one rank. Nothing in this package imports torch; the
arithmetic is reached through the loaded weights and through `Context`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, ClassVar, Literal

from engine.errors import InvalidGGUF
from engine.formats.quants.layout import LAYOUTS
from engine.model.forward.state import KVState, RecurrentState, State
from engine.model.sharding.placement import Placement

if TYPE_CHECKING:
    from engine.formats.gguf.tensors import TensorInfo

Shape = tuple[int, ...]

Holding = Literal["f32", "packed", "planes", "plain"]
"""Form of a tensor in a rank's memory: F32 values ("f32"), the file's blocks ("packed"), planes for
kernels ("planes"), or unquantised values in the file's type ("plain")."""

PLAIN_TYPES = ("F16", "BF16", "F32")
"""Unquantised GGML types that kernels multiply by."""


class TensorSource:
    """Tensors of a file by name, with the checks that every lookup needs.

    Attributes:
        tensors: tensors of the file, and views of parts of them under names of their own.
        used: names that were looked up.
        views: names of the views of each tensor, by the tensor's name.
    """

    def __init__(self, path: str, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self.used: set[str] = set()
        self.views: dict[str, list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, shape: Shape, *others: Shape) -> TensorInfo:
        """Return the tensor `name`, which must have `shape` (slowest dimension first).

        Leading dimensions of 1 do not count, as in llama.cpp: writers add and drop them.

        Args:
            others: other shapes that files may have for the same numbers in the same order.

        Raises:
            InvalidGGUF: it is missing or has another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidGGUF(self.path, f"the tensor {name} is missing")
        self.used.add(name)
        if tensor.shape == shape:
            return tensor
        if _significant(tensor.shape) not in map(_significant, (shape, *others)):
            raise InvalidGGUF(
                self.path, f"the tensor {name} has shape {tensor.shape} instead of {shape}"
            )
        return replace(tensor, shape=shape)

    def add_view(self, part: TensorInfo, whole: str) -> None:
        """Add a view of a part of the tensor `whole` under a name of its own.

        Raises:
            InvalidGGUF: the file also has a tensor of that name.
        """
        if part.name in self.tensors and part.name != whole:
            raise InvalidGGUF(self.path, f"it has {part.name} twice, alone and as part of {whole}")
        self.tensors[part.name] = part
        self.views.setdefault(whole, []).append(part.name)

    def add_name(self, tensor: TensorInfo, name: str) -> None:
        """Add a second name for a tensor, which counts as used.

        Raises:
            InvalidGGUF: the file also has a tensor of that name.
        """
        self.used.add(tensor.name)
        self.add_view(replace(tensor, name=name), tensor.name)

    def is_fully_used(self, name: str) -> bool:
        """Return whether all views of a tensor were looked up."""
        return all(view in self.used for view in self.views.get(name, ()))


def _significant(shape: Shape) -> Shape:
    """Return a shape without its leading dimensions of 1."""
    return tuple(dropwhile(lambda n: n == 1, shape))


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of one layer, with the part of it that each rank holds.

    Attributes:
        owner: layer whose attribute the loader sets.
        attribute: name of that attribute.
        tensor: tensor in the file.
        placement: cut of the tensor over ranks.
        is_matrix: whether activations are multiplied by it, so that it may stay quantised; others
            become F32.
        is_lookup: whether only some rows are read at a time, so that it stays as in the file.
    """

    owner: Module
    attribute: str
    tensor: TensorInfo
    placement: Placement
    is_matrix: bool
    is_lookup: bool = False

    def holding(self, storage: str) -> Holding:
        """Return the form in which a rank holds the tensor.

        Args:
            storage: storage of the rank's matrices, see `engine.planning.plan.DevicePlan`.
        """
        if self.is_lookup:
            return "packed"
        if not self.is_matrix or storage == "f32":
            return "f32"
        if storage == "packed":
            return "packed"
        if self.tensor.type.number in LAYOUTS:
            return "planes"
        return "plain" if self.tensor.type.name in PLAIN_TYPES else "f32"


class Module:
    """Base of layers, blocks and models; an attribute's name is the name of its GGUF tensor.

    Attributes:
        is_nameless: whether the module adds nothing to names: its layers are named as the parent's.
        tensor_names: names in files of attributes with another name.
    """

    is_nameless = False
    tensor_names: ClassVar[Mapping[str, str]] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield direct sub-modules after their names; a list `blk` yields blk.0, blk.1, …"""
        for attribute, value in vars(self).items():
            name = self.tensor_names.get(attribute, attribute)
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        """Find the tensors of this module and of all below it.

        Args:
            name: name of the module in the file; "" for the model.

        Raises:
            InvalidGGUF: a tensor is missing or has the wrong shape.
        """
        prefix = f"{name}." if name else ""
        return [
            slot
            for child_name, child in self.children()
            for slot in child.bind(source, name if child.is_nameless else prefix + child_name)
        ]

    def states(self) -> list[State]:
        """Return the declared caches and states of this module and of all below it."""
        found: list[State] = [
            value for value in vars(self).values() if isinstance(value, KVState | RecurrentState)
        ]
        for _, child in self.children():
            found += child.states()
        return found
