"""Base of model declarations: modules that know tensors' shapes and placements, not values.

A model is declared once for all ranks; `bind` then locates its tensors in a file. The planner then
counts bytes, and the loader sets one rank's attributes. This package does not import torch;
arithmetic goes through the loaded weights and `Context`.
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

PLAIN_TYPES = ("F16", "BF16", "F32")  # unquantised GGML types that kernels support


class TensorSource:
    """Tensors of a file by name, with lookups that check them.

    Attributes:
        tensors: tensors in the file, and views of parts of them.
        used: names that were looked up.
        views: names of each tensor's views.
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

        As in llama.cpp, leading dimensions of 1 are ignored, because converters add and drop them.

        Args:
            others: alternative shapes for the same numbers in the same order.

        Raises:
            InvalidGGUF: the tensor is missing or has a different shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidGGUF(self.path, "the tensor {name} is missing", name=name)
        self.used.add(name)
        if tensor.shape == shape:
            return tensor
        if _significant(tensor.shape) not in map(_significant, (shape, *others)):
            raise InvalidGGUF(
                self.path,
                "the tensor {name} has shape {shape} instead of {wanted}",
                name=name, shape=str(tensor.shape), wanted=str(shape),
            )  # fmt: skip
        return replace(tensor, shape=shape)

    def add_view(self, part: TensorInfo, whole: str) -> None:
        """Add a view of part of the tensor `whole`.

        Raises:
            InvalidGGUF: the file also has a tensor of that name.
        """
        if part.name in self.tensors and part.name != whole:
            raise InvalidGGUF(
                self.path,
                "it contains {name} twice: on its own and as part of {other}",
                name=part.name, other=whole,
            )  # fmt: skip
        self.tensors[part.name] = part
        self.views.setdefault(whole, []).append(part.name)

    def add_name(self, tensor: TensorInfo, name: str) -> None:
        """Add a second name for a tensor and mark the tensor as used.

        Raises:
            InvalidGGUF: the file also has a tensor of that name.
        """
        self.used.add(tensor.name)
        self.add_view(replace(tensor, name=name), tensor.name)

    def is_fully_used(self, name: str) -> bool:
        """Return whether all views of a tensor were looked up."""
        return all(view in self.used for view in self.views.get(name, ()))


def _significant(shape: Shape) -> Shape:
    return tuple(dropwhile(lambda n: n == 1, shape))


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of one layer, with the part of it that each rank holds.

    Attributes:
        owner: layer with the attribute that the loader sets.
        is_matrix: whether it is used in matrix products and may stay quantised; others become F32.
        is_lookup: whether it is used only for row lookups and stays as in the file.
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
            storage: storage of the rank's matrices; see `engine.planning.plan.DevicePlan`.
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
    """Base of layers, blocks and models; attributes are named like their GGUF tensors.

    Attributes:
        is_nameless: whether its layers are named as if they were the parent's.
        tensor_names: GGUF names of attributes that are named differently.
    """

    is_nameless = False
    tensor_names: ClassVar[Mapping[str, str]] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the names and modules of direct children; a list `blk` yields blk.0, blk.1, …"""
        for attribute, value in vars(self).items():
            name = self.tensor_names.get(attribute, attribute)
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        """Locate the tensors of this module, called `name` in the file, and of all its descendants.

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
        """Return the declared caches and states of this module and its descendants."""
        own: list[State] = [
            value for value in vars(self).values() if isinstance(value, KVState | RecurrentState)
        ]
        return own + [state for _, child in self.children() for state in child.states()]
