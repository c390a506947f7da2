"""What a rank on a GPU computes with, as a `Worker` is for a rank on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from engine.gpu.graph import Captured, NotRepeatable, capture
from engine.gpu.ops import GpuOps
from engine.gpu.target import target_of

log = logging.getLogger(__name__)


class Card:
    """Kernels for one GPU, and what is captured of a token on it.

    Args:
        x_bytes: of a quantised activation, see `engine.footprint.x_bytes`.

    Attributes:
        target: what kernels are compiled for.
    """

    def __init__(self, device: torch.device, x_bytes: int) -> None:
        self.device = device
        self.x_bytes = x_bytes
        self.target = target_of(device)

    @property
    def compiles(self) -> bool:
        """Whether a kernel's first start takes longer than the others."""
        return self.target.maker != "interpreter"

    def make_ops(self) -> GpuOps:
        """The arithmetic of one rank."""
        return GpuOps(self.device)

    def capture(
        self, compute: Callable[[], Tensor | None]
    ) -> tuple[Captured[Tensor | None] | None, str]:
        """What computes a token, ready to be replayed; or None, and why that cannot be."""
        try:
            return capture(self.device, compute), ""
        except NotRepeatable as error:
            log.warning("a token on %s is computed step by step: %s", self.device, error)
            return None, str(error)
