"""By which ways the devices of a model reach each other, as was proven on this machine.

Nothing is taken for granted: a way that nobody has proven is not used (`engine.links.proof`). No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal

Pair = tuple[str, str]
"""Ids of the device that gives and of the one that gets."""

Place = Literal["device", "peer", "host"]
"""Where what one device gives another lies meanwhile: in the memory of a device that both are (two
ranks on it), in that of the one that gets it, or in pinned memory of the host."""


@dataclass(frozen=True, slots=True)
class Way:
    """How one GPU gives another its values.

    Attributes:
        stores: where kernels may write them, a few at a time; None if no kernel shall.
        copies: where copies may bring them, many at a time.
    """

    stores: Place | None = "host"
    copies: Place = "host"


BY_HOST = Way()
ON_ONE_DEVICE = Way("device", "device")


@dataclass(frozen=True, slots=True)
class Ways:
    """Between all pairs of GPUs.

    Attributes:
        pairs: what is known; by the host's memory where nothing is.
        has_nccl: NCCL may be used for what is copied.
        notes: what a person should know, as sentences.
    """

    pairs: Mapping[Pair, Way] = field(default_factory=dict)
    has_nccl: bool = False
    notes: tuple[str, ...] = ()

    def between(self, source: str, goal: str) -> Way:
        """From one device to another."""
        if source == goal:
            return ON_ONE_DEVICE
        return self.pairs.get((source, goal), BY_HOST)

    def have_stores(self, devices: Iterable[str]) -> bool:
        """Whether kernels of each of them may write for each other one."""
        pairs = permutations(devices, 2)
        return all(self.between(*pair).stores is not None for pair in pairs)
