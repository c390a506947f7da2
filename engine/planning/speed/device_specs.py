"""Known GPUs and CPUs, from their manufacturers' specifications.

Sources: NVIDIA's data sheet for each card and its white papers on GA102, AD102, GB202, GV100, GA100
and GH100 (tensor cores, dense, FP16 with FP32 accumulation, which on GeForce cards runs at half the
rate of FP16 accumulation); AMD's pages on the Radeon RX 7900 XTX and RX 9070 XT and on Ryzen and
EPYC; Intel's on the Core i9-14900K. Memory sizes are as reported by drivers. The fraction of the
bandwidth that a GEMV reaches was calibrated with published decode speeds: 0.85 up to 1 TB/s, 0.82
at 1.8 TB/s, and 0.7 at 4.8 TB/s, where each multiprocessor must keep more bytes in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.evaluation.workload import DEQUANTISED
from engine.planning.speed.facts import CACHE, DeviceFacts, WeightRate

GIB = 1 << 30

PCIE_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s per PCIe lane by generation, net of the line code (PCI-SIG)."""

PCIE_EFFICIENCY = 0.84
"""Fraction of a slot's bandwidth left after packet headers: 26 of 31.5 GB/s on PCIe 4.0 x16."""

GEMM, GEFORCE_GEMM = 0.56, 0.78
"""Fraction of the peak that a prompt's GEMMs reach. GeForce cards come closer to their peak because
their tensor cores run at half rate when accumulating in F32."""

ATTENTION_PART = 0.2
"""Speed of a prompt's attention relative to GEMMs; it is low because operands are split in two, and
registers leave room for only one program per multiprocessor."""

OP_S, ROUTED_OP_S = 3.8e-6, 9e-6
"""Overhead per matrix in seconds, in dense blocks and in those with routed experts. In a dense
block with 7 matrices, 11 graph nodes take 1.3 µs each, and the small kernels among them 12 µs; in a
block with experts and 8 matrices, it is 14 nodes and 33 µs. Estimated from the compiled kernels."""

GPU_HOST_S = 50e-6
"""Seconds that the host takes between two tokens on a GPU."""

UNPACK_BYTES = 4.6
"""Bytes of traffic per weight and batch if matrices are converted to FP16 first: 0.6 read, 2
written, 2 read again."""

DEQUANTISED_PART = 0.55 / (0.55 + 2 * 4)
"""Fraction of the bandwidth left if each weight is written and read again as F32 for each token."""

RESERVED_BYTES = GIB // 2
"""Bytes used on an idle GPU, for CUDA's context and modules."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Specification of one kind of GPU or CPU.

    Attributes:
        gb_per_s: memory bandwidth, in 10⁹ bytes/s.
        tflop_per_s: peak for dense FP16 or BF16 products, in 10¹² operations/s.
        f32_tflop_per_s: peak for dense F32 products, in 10¹² operations/s.
        streaming: fraction of the bandwidth that a GEMV reaches.
        pcie: PCIe generation and number of lanes.
        nvlink_gb_per_s: total NVLink bandwidth to all peers in one direction, in 10⁹ bytes/s.
        has_peer_access: whether drivers allow peer access over PCIe.
        capability: CUDA compute capability, such as "8.6"; "" if none.
        gemm: fraction of the peak that large products reach.
    """

    name: str
    memory_gib: float
    gb_per_s: float
    tflop_per_s: float
    f32_tflop_per_s: float
    streaming: float = 0.85
    pcie: tuple[int, int] = (4, 16)
    nvlink_gb_per_s: float = 0.0
    has_peer_access: bool = False
    n_cores: int = 0
    capability: str = ""
    gemm: float = GEMM

    @property
    def pcie_bytes_per_s(self) -> float:
        """Bytes/s of the slot in one direction."""
        return pcie_bytes_per_s(*self.pcie)

    def facts(self, device: str) -> DeviceFacts:
        """Return the expected facts of the device with the id `device`."""
        bandwidth = 1e9 * self.gb_per_s * self.streaming
        flop = 1e12 * self.tflop_per_s * self.gemm
        if self.n_cores:
            one = bandwidth / min(self.n_cores, CORES_PER_BANDWIDTH)
            return DeviceFacts(
                device, bandwidth, flop, CPU_OP_S, CPU_OP_S, CPU_HOST_S, self.n_cores, one,
                cache_part=CPU_CACHE_PART,
            )  # fmt: skip
        slow = bandwidth * DEQUANTISED_PART
        f32_flop = 1e12 * self.f32_tflop_per_s * self.gemm
        rates = {
            DEQUANTISED: WeightRate(slow, slow, f32_flop),
            "F32": WeightRate(bandwidth, bandwidth, f32_flop),
            CACHE: WeightRate(bandwidth, bandwidth, ATTENTION_PART * flop),
        }
        return DeviceFacts(
            device, bandwidth, flop, OP_S, ROUTED_OP_S, GPU_HOST_S, unpack_bytes=UNPACK_BYTES,
            rates=rates,
        )  # fmt: skip


UNKNOWN_CPU_BYTES, UNKNOWN_CORE_FLOP = 50e9, 1.5e11
"""Bytes/s of dual-channel memory, and operations/s per core; rough values until measured."""

CORES_PER_BANDWIDTH = 6
"""Number of cores that saturate a desktop CPU's memory bandwidth; larger CPUs need more."""

CPU_OP_S, CPU_HOST_S = 12e-6, 5e-4
"""Overhead per matrix in the CPU's kernels, and on the host between tokens, in seconds; see
tests/bench/log."""

CPU_CACHE_PART = 0.6
"""Bandwidth when reading F16 keys and values, relative to weights; see tests/bench/log."""


def pcie_bytes_per_s(generation: int, width: int) -> float:
    """Return the bytes/s of a PCIe slot in one direction, as programs see it."""
    lane = PCIE_LANE_BYTES[min(max(generation, 1), max(PCIE_LANE_BYTES))]
    return PCIE_EFFICIENCY * lane * width


GPU_SPECS = (
    DeviceSpec("RTX 3060", 12, 360, 25.5, 12.7, capability="8.6", gemm=GEFORCE_GEMM),
    DeviceSpec("RTX 3070", 8, 448, 40.6, 20.3, capability="8.6", gemm=GEFORCE_GEMM),
    DeviceSpec("RTX 3080", 10, 760, 59.5, 29.8, capability="8.6", gemm=GEFORCE_GEMM),
    DeviceSpec(
        "RTX 3090", 24, 936, 71, 35.6, nvlink_gb_per_s=56.25, capability="8.6", gemm=GEFORCE_GEMM
    ),
    DeviceSpec(
        "RTX 4060 Ti 16GB", 16, 288, 44.1, 22.1, pcie=(4, 8), capability="8.9", gemm=GEFORCE_GEMM
    ),
    DeviceSpec("RTX 4070", 12, 504, 58.3, 29.1, capability="8.9", gemm=GEFORCE_GEMM),
    DeviceSpec("RTX 4080", 16, 717, 97.5, 48.7, capability="8.9", gemm=GEFORCE_GEMM),
    DeviceSpec("RTX 4090", 24, 1008, 165, 82.6, capability="8.9", gemm=GEFORCE_GEMM),
    DeviceSpec(
        "RTX 5070 Ti", 16, 896, 87.9, 43.9, pcie=(5, 16), capability="12.0", gemm=GEFORCE_GEMM
    ),
    DeviceSpec(
        "RTX 5080", 16, 960, 112.6, 56.3, pcie=(5, 16), capability="12.0", gemm=GEFORCE_GEMM
    ),
    DeviceSpec(
        "RTX 5090", 32, 1792, 209, 104.8, 0.82, (5, 16), capability="12.0", gemm=GEFORCE_GEMM
    ),
    DeviceSpec("RTX A4000", 16, 448, 76.7, 19.2, has_peer_access=True, capability="8.6"),
    DeviceSpec("RTX A5000", 24, 768, 111, 27.8, 0.85, (4, 16), 56.25, True, capability="8.6"),
    DeviceSpec("RTX A6000", 48, 768, 155, 38.7, 0.85, (4, 16), 56.25, True, capability="8.6"),
    DeviceSpec("RTX PRO 6000", 95.6, 1792, 503, 125, 0.82, (5, 16), 0.0, True, capability="12.0"),
    DeviceSpec("V100", 32, 900, 112, 14, 0.85, (3, 16), 0.0, True, capability="7.0"),
    DeviceSpec("A100", 80, 2039, 312, 19.5, 0.8, (4, 16), 300, True, capability="8.0"),
    DeviceSpec("A100 40GB", 40, 1555, 312, 19.5, 0.8, (4, 16), 300, True, capability="8.0"),
    DeviceSpec("H100", 79.6, 3350, 989, 67, 0.72, (5, 16), 450, True, capability="9.0"),
    DeviceSpec("H200", 140.4, 4800, 989, 67, 0.7, (5, 16), 450, True, capability="9.0"),
    DeviceSpec("RX 7900 XTX", 24, 960, 123, 61.4),
    DeviceSpec("RX 9070 XT", 16, 640, 195, 48.7, pcie=(5, 16)),
)

CPU_SPECS = (
    DeviceSpec("Ryzen 9 7950X", 64, 83, 2.3, 2.3, n_cores=16),
    DeviceSpec("Ryzen 7 7800X3D", 64, 83, 1.1, 1.1, n_cores=8),
    DeviceSpec("Core i9-14900K", 64, 90, 1.8, 1.8, n_cores=24),
    DeviceSpec("EPYC 9654", 384, 461, 10.6, 10.6, n_cores=96),
)
"""CPUs in a typical machine, with the fastest officially supported memory in all channels."""
