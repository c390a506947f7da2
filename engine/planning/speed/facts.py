"""Facts of devices and of links between them, from which speeds are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CACHE = "KV"
"""Key of the KV cache's rate in `DeviceFacts.rates`."""


@dataclass(frozen=True, slots=True)
class WeightRate:
    """Speed at which a device multiplies with weights of one kind.

    Attributes:
        bytes_per_s: bytes of weights per second, as they are held, for one token.
        thread_bytes_per_s: bytes of weights per second of one CPU thread, for one token.
        flop_per_s: multiplications and additions per second for many tokens at once.
    """

    bytes_per_s: float
    thread_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Measured or expected speeds of one device.

    Attributes:
        device: its id; ranks with the same one share it.
        bytes_per_s: bytes per second of weights without a rate of their own, and of the KV cache.
        flop_per_s: operations per second of matrix products for many tokens.
        op_s: seconds that each matrix costs a token beside its bytes: starting, ending, and the
            small steps between matrices.
        routed_op_s: seconds that each matrix costs in a block with routed experts.
        host_s: seconds between two tokens: sampling, Python.
        n_threads: number of the CPU's threads; 0 for a GPU.
        thread_bytes_per_s: `bytes_per_s` of one thread; 0 for a GPU.
        unpack_bytes: memory traffic in bytes for each quantised weight and batch of a prompt, where
            matrices are dequantised before they are multiplied.
        cache_part: part of `bytes_per_s` at which keys and values are read.
        rates: speeds by kind of weights.
    """

    device: str
    bytes_per_s: float
    flop_per_s: float
    op_s: float = 0.0
    routed_op_s: float = 0.0
    host_s: float = 0.0
    n_threads: int = 0
    thread_bytes_per_s: float = 0.0
    unpack_bytes: float = 0.0
    cache_part: float = 1.0
    rates: Mapping[str, WeightRate] = field(default_factory=dict)

    def rate(self, kind: str) -> WeightRate:
        """Return the speed with weights of one kind, or with the KV cache."""
        known = self.rates.get(kind)
        if known is not None:
            return known
        part = self.cache_part if kind == CACHE else 1.0
        one = self.thread_bytes_per_s or self.bytes_per_s
        return WeightRate(part * self.bytes_per_s, part * one, self.flop_per_s)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Speed of the link between two devices: Hockney's model (Parallel Computing 20, 1994).

    Attributes:
        latency_s: seconds of an all-reduce or a move of very few bytes.
        bytes_per_s: bytes per second in one direction while the other one is in use as well.
        covered_bytes: bytes that are sent within the latency.
    """

    latency_s: float
    bytes_per_s: float
    covered_bytes: float = 0.0

    def payload_s(self, n_bytes: float) -> float:
        """Return the seconds of `n_bytes` beside the latency."""
        return max(0.0, n_bytes - self.covered_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """Measured speed of the link between two machines, as tensors go: by TCP, from host memory.

    Attributes:
        a, b: numbers of the machines.
        latency_s: seconds until a message of few bytes has arrived, the median of many.
        mean_s: mean of the same: lost packets make few messages much slower.
        bytes_per_s: bytes per second of a large tensor.
        exchange_s: mean seconds until both have a message that they send each other at once.
    """

    a: int
    b: int
    latency_s: float
    mean_s: float
    bytes_per_s: float
    exchange_s: float

    @property
    def facts(self) -> LinkFacts:
        """Facts from which predictions start."""
        return LinkFacts(self.mean_s, self.bytes_per_s, MESSAGE_BYTES)

    @property
    def stall_s(self) -> float:
        """Mean seconds that a message waits for lost packets."""
        return max(0.0, self.mean_s - self.latency_s)


MESSAGE_BYTES = 4096
"""Bytes of the message whose latency is measured: an order of machine 0, or a small activation."""
