"""The GGML tensor types that a GGUF file may name, and how many bytes their rows take.

Knows nothing of torch, so that headers can be read and plans made without it; how the bytes
become numbers is the matter of `engine.quants`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """How one GGML type is laid out.

    Attributes:
        number: as stored in the file.
        name: as GGML spells it, such as "Q4_K".
        block_size: elements per block, the smallest unit a row is made of.
        type_size: bytes per block.
    """

    number: int
    name: str
    block_size: int
    type_size: int


# Types that the gguf package of some supported version does not know.
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
"""Every GGML type by its number."""


def row_bytes(info: TypeInfo, n_elements: int) -> int:
    """The bytes of a row of `n_elements`.

    Raises:
        ValueError: the row is no whole number of blocks.
    """
    n_blocks, rest = divmod(n_elements, info.block_size)
    if rest:
        raise ValueError(
            f"a row of {n_elements} is no whole number of {info.name} blocks of {info.block_size}"
        )
    return n_blocks * info.type_size
