"""Routes by which the devices of a model reach each other, as proven on this machine.

Nothing is taken for granted: a route that was not proven is not used (`interconnect.proof`).
Without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal

Pair = tuple[str, str]
"""Ids of the sending and the receiving device."""

Place = Literal["device", "peer", "host"]
"""Memory through which one device sends to another: of the one device that both ranks share, of the
receiving device ("peer"), or pinned memory of the host."""


@dataclass(frozen=True, slots=True)
class Way:
    """The route by which one GPU sends values to another.

    Attributes:
        stores: memory that kernels may write small messages to; None if no kernel may.
        copies: memory that copies may bring large messages to.
    """

    stores: Place | None = "host"
    copies: Place = "host"


BY_HOST = Way()
ON_ONE_DEVICE = Way("device", "device")


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes between all pairs of GPUs.

    Attributes:
        pairs: known routes; all others go through the host's memory.
        has_nccl: whether NCCL may be used in place of copies.
        notes: sentences that a person should read.
    """

    pairs: Mapping[Pair, Way] = field(default_factory=dict)
    has_nccl: bool = False
    notes: tuple[str, ...] = ()

    def between(self, source: str, goal: str) -> Way:
        """Return the route from one device to another."""
        if source == goal:
            return ON_ONE_DEVICE
        return self.pairs.get((source, goal), BY_HOST)

    def have_stores(self, devices: Iterable[str]) -> bool:
        """Return whether kernels on each of the devices may write to each other one."""
        pairs = permutations(devices, 2)
        return all(self.between(*pair).stores is not None for pair in pairs)
