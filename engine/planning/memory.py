"""Memory by purpose: what a device is predicted to hold, and what it really holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device by purpose.

    Attributes:
        weights: bytes of the weights.
        kv: bytes of the KV cache and of recurrent states on the device itself.
        compute: bytes of working memory.
        host_kv: bytes of keys and values that lie in the host's memory instead; not in `total`.
    """

    weights: int = 0
    kv: int = 0
    compute: int = 0
    host_kv: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device itself."""
        return self.weights + self.kv + self.compute


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Predicted and measured bytes of one rank.

    Attributes:
        device: name of its device, such as "cuda:0".
    """

    device: str
    predicted: MemoryUse
    measured: MemoryUse
