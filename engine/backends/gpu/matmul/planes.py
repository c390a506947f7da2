"""Quantised matrices as products take them, and the kernel constants of their types.

A kernel that reads planes takes the names in `constants_of` as `tl.constexpr` parameters and passes
them to the functions in `engine.backends.gpu.kernels.planes`; so one kernel serves all types.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from engine.formats.quants.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engine.formats.quants.layout import Extent, Layout


class QuantisedMatrix(Protocol):
    """A matrix (n_rows, extent.n_columns) in planes, see `engine.formats.quants.layout`.

    Attributes:
        planes: uint8 (n_tile, tile_bytes).
        type_number: number of the GGML type.
        n_rows: number of rows.
        extent: columns of the file's matrix that are held.
        x_bytes: bytes of a quantised activation that is multiplied with it, 1 or 2.
    """

    planes: Tensor
    type_number: int
    n_rows: int
    extent: Extent
    x_bytes: int


@cache
def constants_of(type_number: int) -> Mapping[str, Any]:
    """Return the constants of a GGML type, a key of `LAYOUTS`, as keywords for `launch`.

    A type always gives the same dictionary object; a call takes keywords fastest from a dictionary.
    """
    return layout_constants(LAYOUTS[type_number])


def layout_constants(layout: Layout) -> dict[str, Any]:
    """Return the attributes of a layout as constants; see `Layout` for their meaning.

    Returns:
        LOW, HIGH: bits of a code in each plane; ZERO: code of the number 0; TABLE: the codes'
        numbers, empty where a code is its number; SCALE: kind of scales; SUB: columns per scale;
        SIGNED: whether scales of one byte are signed.
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
