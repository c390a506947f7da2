"""What a model is declared with: modules that know their tensors, but not yet the numbers.

A model is declared once for all ranks: each layer states the shape of its tensors and how they lie
on the ranks. `bind` then finds the tensors in a file. From there on, the planner counts bytes and
the loader fills the attributes of one rank. Nothing in this package imports torch; the arithmetic
is reached through the loaded weights and through `Context`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, ClassVar, Literal

from engine.errors import InvalidGGUF
from engine.forward.state import KVState, RecurrentState, State
from engine.quants.layout import LAYOUTS
from engine.sharding.placement import Placement

if TYPE_CHECKING:
    from engine.gguf import TensorInfo

Shape = tuple[int, ...]

Holding = Literal["f32", "packed", "planes", "plain"]
"""F32 values; the file's blocks; planes for the CPU's kernels; values as short as in the file."""

PLAIN_TYPES = ("F16", "BF16", "F32")


class TensorSource:
    """The tensors of a file, by name, with the checks that every lookup needs.

    Attributes:
        tensors: what is in the file, and views that show parts of a tensor under other names.
        used: the names that were asked for.
        parts: the names of the views on a tensor, by its own.
    """

    def __init__(self, path: str, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self.used: set[str] = set()
        self.parts: dict[str, list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, shape: Shape, *others: Shape) -> TensorInfo:
        """The tensor `name`, which must have `shape` (slowest dimension first).

        Leading dimensions of 1 do not count, as in llama.cpp: writers add and drop them.

        Args:
            others: shapes in which files have the same numbers in the same order.

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

    def show(self, part: TensorInfo, whole: str) -> None:
        """Show a part of the tensor `whole` under a name of its own.

        Raises:
            InvalidGGUF: the file has a tensor of that name beside it.
        """
        if part.name in self.tensors and part.name != whole:
            raise InvalidGGUF(self.path, f"it has {part.name} twice, alone and as part of {whole}")
        self.tensors[part.name] = part
        self.parts.setdefault(whole, []).append(part.name)

    def is_whole(self, name: str) -> bool:
        """Whether a tensor that was asked for was so with all its parts."""
        return all(part in self.used for part in self.parts.get(name, ()))


def _significant(shape: Shape) -> Shape:
    """A shape without its leading dimensions of 1."""
    return tuple(dropwhile(lambda n: n == 1, shape))


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of one layer: where it comes from and which part of it each rank holds.

    Attributes:
        owner: the layer whose attribute `attribute` the loader sets.
        is_matrix: multiplied with activations, so it may stay quantised; vectors become F32.
        is_lookup: only some rows are read at a time, so it always stays as in the file.
    """

    owner: Module
    attribute: str
    tensor: TensorInfo
    placement: Placement
    is_matrix: bool
    is_lookup: bool = False

    def holding(self, storage: str) -> Holding:
        """How a rank holds it.

        Args:
            storage: how the rank holds matrices in general, see `engine.planning.plan.DevicePlan`.
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
        is_nameless: only groups layers, which are named as if they were the parent's own.
        tensor_names: the names of attributes that are called otherwise in files.
    """

    is_nameless = False
    tensor_names: ClassVar[Mapping[str, str]] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Direct sub-modules with their names; a list `blk` yields blk.0, blk.1, …"""
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

        Raises:
            InvalidGGUF: one is missing or has the wrong shape.
        """
        prefix = f"{name}." if name else ""
        return [
            slot
            for child_name, child in self.children()
            for slot in child.bind(source, name if child.is_nameless else prefix + child_name)
        ]

    def states(self) -> list[State]:
        """What this module and all below it remember between tokens."""
        found: list[State] = [
            value for value in vars(self).values() if isinstance(value, KVState | RecurrentState)
        ]
        for _, child in self.children():
            found += child.states()
        return found
