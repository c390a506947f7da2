"""Other engines whose speed was published, as far as they differ from this one.

Each is described by a few properties, and none of them was found from speeds on several GPUs:

- How it all-reduces: by what means and in what type, as its source or its users say.
- What an all-reduce or the start of a kernel costs, as measured by others apart from any model
  (named below), or as stated.
- How fast it reads and multiplies on one GPU: `tests.bench.published` works that out from a speed
  on one GPU, or of whole blocks on one GPU after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from engine.planning.speed.facts import DeviceFacts, LinkFacts
from engine.planning.speed.links import Links

OP_S, ROUTED_OP_S = 1.7e-6, 4.1e-6
"""Seconds per matrix: 8 graph nodes of a dense block with 7 matrices take 1.5 µs each beside their
bytes, 11 of one with 8 matrices and small experts 3 µs."""

INT8_TOP_PER_S: Mapping[str, float] = {
    "RTX 3090": 284, "RTX 4090": 660.6, "RTX 5090": 838, "RX 9070 XT": 389,
}  # fmt: skip
"""Tera-operations per second of dense INT8 products, in which llama.cpp computes prompts. Sources:
white papers on GA102, AD102 and GB202 (four times FP16 with F32 accumulators), AMD's page (779 with
sparsity)."""

INT8_PART = 0.22
"""Share of `INT8_TOP_PER_S` that llama.cpp reaches in prefill of an 8B model on one GPU: 24 % on a
4090 (10.36 thousand tokens/s, llama.cpp#7676), 21 % on a 5090 (11.9, #27341), 20 % on a 3090 (3.75,
#8062)."""

NCCL_S = 3e-6
"""Seconds to start an all-reduce of NCCL."""

NCCL_PEER_HOP_S = 2.75e-6
"""Seconds of a hop between GPUs that reach each other over PCIe; an all-reduce is a ring of
2 (n - 1) hops: 8.3 to 9.9 µs were measured for two (flashinfer#5023), 19.4 for four
(sglang-V100#2), 45 for eight (sglang#32479)."""

NCCL_SHM_HOP_S = 7e-6
"""Seconds of a hop through shared memory; an all-reduce is a tree of 2 log2(n) hops: 11.5 µs were
measured for an exchange of two, which is one hop and a start
(tinygrad/open-gpu-kernel-modules#17), 37 and 42 for eight (nccl#922, #1530). The 39 µs of two
5070 Ti (sglang#39605) do not fit that."""

NCCL_SHM_BYTES_PER_S = 6.1e9
"""Bandwidth of a ring through shared memory: the mean over sizes for eight L20 (nccl#1817). Desktop
computers have less: 1.9 (sglang#39605)."""

COPY_EXCHANGE_S = 81e-6
"""Seconds to exchange a few bytes by copies through the host's memory: an all-reduce of NCCL over
two ranks with NCCL_SHM_USE_CUDA_MEMCPY=1 (sglang#39605)."""

LAUNCH_S = 5e-6
"""Seconds of the host to start a kernel: 4 to 6 µs of CUDA's own."""

SEGMENT_GAP_S = 6.5e-6
"""Seconds between two graphs on a GPU: an estimate, 5 to 8 µs."""

PER_BLOCK = 300 / 32 + 2
"""Number of kernels of a block without graphs: 300 of a model with 32 blocks, and two
all-reduces."""

SumTime = Callable[[Links, Sequence[str], float], float]
"""Seconds of an all-reduce, from the links, the devices and the bytes of the value in F32."""


@dataclass(frozen=True)
class Pace:
    """Speeds of an engine relative to the expected ones: reading, multiplying, starting."""

    reads: float = 1.0
    multiplies: float = 1.0
    starts: float = 1.0


@dataclass(frozen=True)
class Engine:
    """Properties of another engine.

    Attributes:
        sum_s: seconds of its all-reduce.
        gap_s: seconds that a GPU waits at each all-reduce in addition.
        op_s, routed_op_s: see `DeviceFacts`.
        is_int8: whether it computes prompts in INT8, without dequantising matrices.
        n_start: number of kernels of a block that one thread starts on each GPU, one GPU after the
            other; 0 where graphs do it.
    """

    sum_s: SumTime
    gap_s: float = 0.0
    op_s: float = OP_S
    routed_op_s: float = ROUTED_OP_S
    is_int8: bool = True
    n_start: float = 0.0

    def facts(self, known: DeviceFacts, card: str, pace: Pace) -> DeviceFacts:
        """Return the facts of a device on which this engine computes."""
        flop_per_s = known.flop_per_s
        if self.is_int8:
            flop_per_s = 1e12 * INT8_TOP_PER_S[card] * INT8_PART
        return replace(
            known,
            bytes_per_s=pace.reads * known.bytes_per_s,
            flop_per_s=pace.multiplies * flop_per_s,
            op_s=self.op_s / pace.starts,
            routed_op_s=self.routed_op_s / pace.starts,
            unpack_bytes=0.0 if self.is_int8 else known.unpack_bytes,
            rates={},
        )


class EngineLinks(Links):
    """Links of a rig with the all-reduce times of another engine."""

    def __init__(self, links: Links, engine: Engine) -> None:
        super().__init__({})
        self._links, self._engine = links, engine

    def between(self, a: str, b: str) -> LinkFacts:
        return self._links.between(a, b)

    def all_reduce_s(self, devices: Sequence[str], n_bytes: float) -> float:
        if len(devices) < 2:
            return 0.0
        return self._engine.sum_s(self._links, devices, n_bytes) + self._engine.gap_s


def own_kernels(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of kernels that access peers' memory, BF16 or F16: one-shot or slices."""
    group = links.group(devices)
    return min(group.one_shot_s(n_bytes / 2), group.sliced_s(n_bytes / 2, 0.0))


def nccl_over_peers(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of NCCL's ring over PCIe, BF16."""
    n = len(devices)
    ring = links.group(devices).exchange_s(2 * n_bytes / 2 / n)
    return NCCL_S + 2 * (n - 1) * NCCL_PEER_HOP_S + ring


def nccl_over_shm(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of NCCL through shared memory, BF16."""
    return _nccl_over_shm(len(devices), n_bytes / 2)


def _nccl_over_shm(n: int, n_bytes: float) -> float:
    hops = 2 * ceil(log2(n)) * NCCL_SHM_HOP_S
    return NCCL_S + hops + 2 * (n - 1) / n * n_bytes / NCCL_SHM_BYTES_PER_S


F32_ELEMENTS: Mapping[int, int] = {2: 32768, 3: 131072}
"""Number of elements from which on llama.cpp all-reduces in BF16 instead of F32, by number of GPUs;
262144 from four GPUs on."""


def llama_nccl(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of llama.cpp's default on Linux: NCCL without peer access (GeForce)."""
    n = len(devices)
    is_small = n_bytes / 4 < F32_ELEMENTS.get(n, 262144)
    return _nccl_over_shm(n, n_bytes if is_small else n_bytes / 2)


INTERNAL_BYTES = 1 << 20


def llama_internal(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of llama.cpp's own all-reduce on Windows, BF16, through the host.

    Small values go by one kernel, larger ones by copies in chunks.
    """
    stage_s = COPY_EXCHANGE_S if n_bytes / 2 >= INTERNAL_BYTES else 0.0
    return stage_s + links.group(devices).one_shot_s(n_bytes / 2)


def llama_butterfly(links: Links, devices: Sequence[str], n_bytes: float) -> float:
    """Return the seconds of llama.cpp's fallback: copies in F32, with one other GPU at a time."""
    pair = links.group(devices[:2])
    return ceil(log2(len(devices))) * (COPY_EXCHANGE_S + pair.exchange_s(n_bytes))


LLAMA_NCCL = Engine(llama_nccl, SEGMENT_GAP_S)
LLAMA_INTERNAL = Engine(llama_internal, SEGMENT_GAP_S)
LLAMA_BUTTERFLY = Engine(llama_butterfly, SEGMENT_GAP_S)

IK = Engine(own_kernels, n_start=PER_BLOCK)
"""ik_llama.cpp with split mode "graph", without CUDA graphs then (ik_llama.cpp#1040, #1177)."""

IK_ASYNC = Engine(own_kernels)
"""ik_llama.cpp with split mode "graph" and a thread for each GPU (-sas)."""

VLLM_SHM = Engine(nccl_over_shm, is_int8=False)
VLLM_PEERS = Engine(nccl_over_peers, is_int8=False)
VLLM_OWN = Engine(own_kernels, is_int8=False)

GPT_FAST = Engine(own_kernels, op_s=5.8e-6, is_int8=False)
"""gpt-fast, compiled by torch. Its two speeds with BF16 on one GPU, 9.53 ms for 13.2 GB of 32
blocks and 10.65 ms for 15.0 GB of as many, leave 1.3 ms that are not reading: 5.8 µs for each of 7
matrices a block. All-reduces are kernels over NVLink (ENABLE_INTRA_NODE_COMM=1)."""
