"""What is known of devices and of what connects them: speeds are predicted from these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CACHE = "KV"
"""The kind of what is read of the cache, in `DeviceFacts.rates`."""


@dataclass(frozen=True, slots=True)
class WeightRate:
    """How fast a device multiplies with weights of one kind.

    Attributes:
        bytes_per_s: of weights, as held, for one token.
        thread_bytes_per_s: the same by one thread of a CPU.
        flop_per_s: multiplications and additions for many tokens at once.
    """

    bytes_per_s: float
    thread_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one device can do.

    Attributes:
        device: its id; ranks with the same one share it.
        bytes_per_s: reading weights that nothing else is known of, and keys and values.
        flop_per_s: products of matrices for many tokens.
        op_s: what each matrix costs a token beside its bytes: starting, ending, and the small steps
            between matrices.
        routed_op_s: the same in a block whose tokens go to different experts.
        host_s: between two tokens: sampling, Python.
        n_threads: of a CPU, all of them; 0 for a GPU.
        thread_bytes_per_s: `bytes_per_s` of one of them; 0 where there are none.
        unpack_bytes: memory traffic for each quantised weight and batch of a prompt, where matrices
            are dequantised before they are multiplied.
        cache_part: of `bytes_per_s`, at which keys and values are read.
        rates: by kind of weights.
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
        """How fast it is with weights of a kind, or with the cache."""
        known = self.rates.get(kind)
        if known is not None:
            return known
        part = self.cache_part if kind == CACHE else 1.0
        one = self.thread_bytes_per_s or self.bytes_per_s
        return WeightRate(part * self.bytes_per_s, part * one, self.flop_per_s)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What connects two devices: Hockney's model (Parallel Computing 20, 1994).

    Attributes:
        latency_s: of a sum over the two, or of a move from one to the other, of very few bytes.
        bytes_per_s: of what is sent, in one direction, while the other is in use as well.
        covered_bytes: so many are sent within the latency.
    """

    latency_s: float
    bytes_per_s: float
    covered_bytes: float = 0.0

    def payload_s(self, n_bytes: float) -> float:
        """Seconds of some bytes beside the latency."""
        return max(0.0, n_bytes - self.covered_bytes) / self.bytes_per_s
