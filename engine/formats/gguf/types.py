"""GGML tensor types that a GGUF file may name, and the size of their rows.

Without torch, so that headers can be read and plans made without it. `formats.quants` turns the
bytes into numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """Block layout of one GGML type.

    Attributes:
        number: number in the file.
        name: GGML's name, such as "Q4_K".
        block_size: number of elements of a block, the smallest unit of a row.
        type_size: size of a block, in bytes.
    """

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
    """Return the size of a row of `n_elements`, in bytes.

    Raises:
        ValueError: the row is not a whole number of blocks.
    """
    n_blocks, rest = divmod(n_elements, info.block_size)
    if rest:
        raise ValueError(
            f"{n_elements} elements are not a whole number of {info.name} blocks "
            f"of {info.block_size}"
        )
    return n_blocks * info.type_size
