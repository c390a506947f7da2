"""Trials of links start GPU kernels, interpreted as in `tests/engine/backends/gpu`."""

from tests.engine.backends.gpu.conftest import device

__all__ = ["device"]
