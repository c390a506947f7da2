"""Which arithmetic a rank uses: the kernels for its device, or the exact reference."""

from __future__ import annotations

import os

from engine.errors import EngineError

VARIABLE = "TANDEM_BACKEND"


def is_reference() -> bool:
    """Whether everything shall be computed in F32 with dequantised weights.

    Raises:
        EngineError: the variable is set to something else than "reference".
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "reference"):
        raise EngineError(
            f"{VARIABLE} is {value[:40]!r}, which is no backend.",
            "Set it to reference, or unset it.",
        )
    return value == "reference"


def uses_kernels(device: str) -> bool:
    """Whether a rank on this device computes with kernels of our own."""
    return device == "cpu" and not is_reference()
