"""Tensors in a GGUF file: name, type, shape, and position of the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import InvalidGGUF, Sentence


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """Block layout for a GGML type: elements and bytes per block, the smallest unit of a row."""

    number: int
    name: str
    block_size: int
    type_size: int


# types missing in some supported versions of the gguf package
_ADDED = (
    TypeInfo(41, "Q1_0", block_size=128, type_size=2 + 128 // 8),
    TypeInfo(42, "Q2_0", block_size=64, type_size=2 + 64 // 4),
)


def _collect() -> dict[int, TypeInfo]:
    types = {info.number: info for info in _ADDED}
    for kind in GGMLQuantizationType:
        if kind in GGML_QUANT_SIZES and int(kind) not in types:
            types[int(kind)] = TypeInfo(int(kind), kind.name, *GGML_QUANT_SIZES[kind])
    return dict(sorted(types.items()))


TYPES: Mapping[int, TypeInfo] = MappingProxyType(_collect())
"""All GGML types by number."""


def row_bytes(info: TypeInfo, n_elements: int) -> int:
    """Return the bytes per row; raise ValueError if a row is not a whole number of blocks."""
    n_blocks, rest = divmod(n_elements, info.block_size)
    if rest:
        raise ValueError(
            f"{n_elements} elements are not a whole number of {info.name} blocks "
            f"of {info.block_size}"
        )
    return n_blocks * info.type_size


MAX_OFFSET: Final = 1 << 63  # files are smaller, so a larger offset is wrong


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in a header.

    Attributes:
        shape: sizes in torch's order, slowest first; the last is the length of a contiguous row.
        part: index of the tensor's file among the parts of a split model.
        offset: offset of the first byte in that file.
    """

    name: str
    type: TypeInfo
    shape: tuple[int, ...]
    part: int
    offset: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_rows(self) -> int:
        """Number of contiguous rows."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Size of a row, in bytes."""
        return row_bytes(self.type, self.shape[-1])

    @property
    def n_bytes(self) -> int:
        """Size of the tensor, in bytes."""
        return self.n_rows * self.row_bytes

    def rows(self, start: int, stop: int, name: str) -> TensorInfo:
        """Return a view of the rows `start:stop` in a matrix, or of those elements in a vector.

        This is used to split a fused tensor into its parts.

        Raises:
            ValueError: the range is out of bounds, is empty or cuts a block, or the tensor has more
                than two axes.
        """
        if len(self.shape) > 2:
            raise ValueError(f"{self.name} has the shape {self.shape}; only a matrix has rows")
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"{self.name} has {self.shape[0]} rows, so there is no {start}:{stop}")
        shape = (stop - start, *self.shape[1:])
        row_bytes(self.type, shape[-1])
        skipped = start * self.row_bytes if len(shape) == 2 else row_bytes(self.type, start)
        return replace(self, name=name, shape=shape, offset=self.offset + skipped)


_IN_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")


def split_name(name: str) -> tuple[int, str] | None:
    """Return a tensor's block number and its name within the block; None if it is in no block."""
    found = _IN_BLOCK.fullmatch(name)
    return None if found is None else (int(found[1]), found[2])


def check_layout(
    path: Path, entries: Sequence[TensorInfo], data_start: int, alignment: int, file_size: int
) -> tuple[TensorInfo, ...]:
    """Return tensors with offsets from the start of the file, given offsets from `data_start`.

    Raises:
        InvalidGGUF: a tensor overlaps another or extends beyond the file.
    """
    names: set[str] = set()
    for tensor in entries:
        if tensor.name in names:
            problem = Sentence("it has two tensors named {name}", name=quote(tensor.name))
            raise InvalidGGUF(path, problem)
        names.add(tensor.name)
        _check_shape(path, tensor)
        if tensor.offset % alignment:
            problem = Sentence(
                "the data of {name} is not aligned to {n} bytes",
                name=quote(tensor.name),
                n=alignment,
            )
            raise InvalidGGUF(path, problem)
    tensors = tuple(replace(tensor, offset=data_start + tensor.offset) for tensor in entries)
    _check_extents(path, tensors, file_size)
    return tensors


def _check_shape(path: Path, tensor: TensorInfo) -> None:
    name = quote(tensor.name)
    if 0 in tensor.shape:
        raise InvalidGGUF(path, Sentence("the tensor {name} has an empty dimension", name=name))
    if tensor.shape[-1] % tensor.type.block_size:
        problem = Sentence(
            "the tensor {name} has rows of {n} elements, not a multiple of the {type} block size"
            " {size}",
            n=tensor.shape[-1], name=name, type=tensor.type.name, size=tensor.type.block_size,
        )  # fmt: skip
        raise InvalidGGUF(path, problem)


def _check_extents(path: Path, tensors: Sequence[TensorInfo], file_size: int) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            problem = Sentence(
                "the data of {name} and {other} overlap", name=quote(last), other=quote(tensor.name)
            )
            raise InvalidGGUF(path, problem)
        end, last = tensor.offset + tensor.n_bytes, tensor.name
        if end >= MAX_OFFSET:
            problem = Sentence(
                "the tensor {name} claims an impossible size or position", name=quote(last)
            )
            raise InvalidGGUF(path, problem)
    if end > file_size:
        problem = Sentence(
            "the file is truncated: {n} of {total} bytes are missing", n=end - file_size, total=end
        )
        raise InvalidGGUF(path, problem)


def quote(name: str) -> str:
    """Return a name from a file for use in a message: quoted, short, without control characters."""
    return repr(name if len(name) <= 80 else name[:79] + "…")
