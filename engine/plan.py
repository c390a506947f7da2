"""Where the bytes of a model will go, from its header alone: no torch, no weights.

`Planner` opens a file once and then evaluates plans; one evaluation walks the same declarations
that the loader later fills, so that what is predicted for weights and KV cache is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import MemoryUse


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One rank of a plan.

    Attributes:
        asked: the wanted share, 0 to 1; the shares of all ranks sum to 1.
        effective: the share of the splittable weight elements that the rank really gets.
        memory: predicted bytes.
    """

    rank: int
    device: str
    asked: float
    effective: float
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of one model over ranks.

    Attributes:
        n_ctx: context in tokens that the KV cache is made for.
        storage: how weights are held: "f32" (dequantised) or "packed" (as in the file).
    """

    devices: tuple[DevicePlan, ...]
    split_mode: str
    n_ctx: int
    kv_type: str
    storage: str
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(d.memory.total for d in self.devices)
