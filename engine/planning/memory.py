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
        padding: bytes that torch's allocator adds to weights and cache on a GPU by rounding.
        pinned: bytes of the host's memory for copies from and to a GPU; not in `total`.
        draft: bytes of the draft model, which lies whole on one rank's device.
        pictures: bytes of the encoder of pictures, likewise, and of its work on the largest one.
    """

    weights: int = 0
    kv: int = 0
    compute: int = 0
    host_kv: int = 0
    padding: int = 0
    pinned: int = 0
    draft: int = 0
    pictures: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device itself."""
        beside = self.draft + self.pictures
        return self.weights + self.kv + self.compute + self.padding + beside

    @property
    def on_host(self) -> int:
        """Bytes in the host's memory for a GPU."""
        return self.host_kv + self.pinned


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Predicted and measured bytes of one rank.

    Attributes:
        device: name of its device, such as "cuda:0".
    """

    device: str
    predicted: MemoryUse
    measured: MemoryUse
