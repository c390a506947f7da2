"""Trials of links start GPU kernels: they are interpreted here as in `tests/engine/gpu`."""

from tests.engine.gpu.conftest import device

__all__ = ["device"]
