"""What kernels are compiled for, from the layout of a type's planes.

A kernel that reads planes takes the names in `constants_of` as `tl.constexpr` parameters and hands
them on to the functions in `engine.gpu.kernels.planes`; so one kernel serves all types.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from engine.quants.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engine.quants.extent import Extent
    from engine.quants.layout import Layout


class PlaneMatrix(Protocol):
    """A matrix (n_rows, extent.n_columns) in planes, see `engine.quants.layout`.

    Attributes:
        planes: uint8 (n_tile, tile_bytes).
        type_number: the GGML type.
        x_bytes: of a quantised activation, 1 or 2.
    """

    planes: Tensor
    type_number: int
    n_rows: int
    extent: Extent
    x_bytes: int


@cache
def constants_of(type_number: int) -> Mapping[str, Any]:
    """The constants of a GGML type, a key of `LAYOUTS`, as keywords for `launch`."""
    return MappingProxyType(layout_constants(LAYOUTS[type_number]))


def layout_constants(layout: Layout) -> dict[str, Any]:
    """The attributes of a layout as constants; see `Layout` for what they mean.

    Returns:
        LOW, HIGH: bits of the planes; ZERO: what codes are counted from; TABLE: what they stand
        for, 16 numbers or none; SCALE: the kind of scales; SUB: columns of each; SIGNED: whether
        bytes of scales are.
    """
    return {
        "LOW": layout.low,
        "HIGH": layout.high,
        "ZERO": layout.zero,
        "TABLE": layout.table,
        "SCALE": layout.scale,
        "SUB": layout.sub,
        "SIGNED": layout.signed_scale,
    }
