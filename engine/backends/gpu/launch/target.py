"""Targets of kernels: the kind of a device, and the instructions that are fastest there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Maker = Literal["nvidia", "amd", "interpreter"]
GemvOperands = Literal["int8", "f32"]


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """Properties of a device that kernels are compiled for.

    Attributes:
        maker: maker of the device; "interpreter" for Triton's interpreter on the CPU.
        capability: NVIDIA's compute capability times ten, such as 90; 0 elsewhere.
        n_sm: number of multiprocessors.
    """

    maker: Maker
    capability: int
    n_sm: int

    @property
    def is_interpreted(self) -> bool:
        """Whether numpy computes, which has no BF16."""
        return self.maker == "interpreter"

    @property
    def has_asm(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.maker == "nvidia"

    @property
    def gemv_operands(self) -> GemvOperands:
        """Type of the activations that gemv multiplies: "int8" (by `dp4a`) or "f32"."""
        return "int8" if self.maker == "interpreter" or self.capability >= 61 else "f32"

    @property
    def dot_precision(self) -> str:
        """`input_precision` of `tl.dot` with F32 operands for a result as exact as F32."""
        return "tf32x3" if self.capability >= 80 else "ieee"


INTERPRETER = KernelTarget("interpreter", 0, 4)


_aim = threading.local()
_cards: dict[torch.device, KernelTarget] = {}


def target_of(device: torch.device) -> KernelTarget:
    """Return the target of kernels for tensors on `device`; for "meta", that of `use_target`."""
    found = _cards.get(device)
    if found is None and device.type == "cuda":
        found = _cards[device] = _card(device)
    elif found is None and device.type == "meta":
        found = getattr(_aim, "target", None)
    return found or INTERPRETER


@contextmanager
def use_target(target: KernelTarget) -> Iterator[None]:
    """Treat the device "meta" as this target, on this thread."""
    before = getattr(_aim, "target", None)
    _aim.target = target
    try:
        yield
    finally:
        _aim.target = before


def _card(device: torch.device) -> KernelTarget:
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return KernelTarget("amd", 0, facts.multi_processor_count)
    return KernelTarget("nvidia", 10 * facts.major + facts.minor, facts.multi_processor_count)
