"""Memory that CUDA takes on a GPU before a model does."""

from __future__ import annotations

CUDA_OVERHEAD_BYTES = 500 << 20
"""Bytes of a GPU that CUDA and its libraries take before anything is computed there: 300 to 600 MB,
by driver and card."""


def overhead_bytes(device: str) -> int:
    """Return the bytes that a device's runtime takes by itself: 0 on the CPU."""
    return 0 if device == "cpu" else CUDA_OVERHEAD_BYTES
