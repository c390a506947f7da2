"""Memory that CUDA takes on a GPU before a model does."""

from __future__ import annotations

from collections.abc import Mapping

from engine.hardware.devices.places import is_cpu

CUDA_OVERHEAD_BYTES = 500 << 20
"""Bytes of a GPU that CUDA and its libraries take before anything is computed there, as long as
they were not measured: 300 to 600 MB, by driver and card."""

LEAST_OVERHEAD, MOST_OVERHEAD = 64 << 20, 4 << 30
"""Least and most bytes that a measurement may give; drivers tell nonsense in some containers."""

_measured: dict[str, int] = {}
"""Measured bytes of this machine's GPUs, or none, by id."""


def overhead_bytes(device: str) -> int:
    """Return the bytes that a device's runtime takes by itself: 0 on the CPU."""
    return 0 if is_cpu(device) else _measured.get(device, CUDA_OVERHEAD_BYTES)


def use_overheads(measured: Mapping[str, int]) -> None:
    """Plan with these bytes from now on, by a GPU's id, and with the default for all others."""
    _measured.clear()
    _measured.update(measured)


def is_overhead(n_bytes: int) -> bool:
    """Return whether a measurement may be right."""
    return LEAST_OVERHEAD <= n_bytes <= MOST_OVERHEAD
