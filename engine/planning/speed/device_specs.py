"""Known cards and processors: what their makers' specification sheets say.

Sources: NVIDIA's data sheets of each card and its white papers on GA102, AD102, GB202, GV100, GA100
and GH100 (tensor cores, dense, FP16 with sums in FP32: of GeForce cards half the rate of FP16
sums); AMD's pages on the Radeon RX 7900 XTX and RX 9070 XT and on Ryzen and EPYC; Intel's on the
Core i9-14900K. Memory is what drivers report. How much of the bandwidth a product of a matrix with
one token reaches was calibrated with published speeds of decoding: 0.85 up to 1 TB/s, 0.82 at 1.8,
0.7 at 4.8, where each multiprocessor has more bytes to keep in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.evaluation.workload import DEQUANTISED
from engine.planning.speed.facts import DeviceFacts, WeightRate

GIB = 1 << 30

PCIE_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of a lane by generation, after the line code (PCI-SIG)."""

PCIE_EFFICIENCY = 0.84
"""What is left after packet headers: 26 GB/s of 31.5 on PCIe 4.0 x16."""

MATMUL_EFFICIENCY = 0.6
"""Of the peak, in products of a prompt: 0.5 to 0.7 on consumer cards."""

OP_S, ROUTED_OP_S = 1.7e-6, 4.1e-6
"""Per matrix: 8 nodes of a dense block with 7 matrices take 1.5 µs each beside their bytes, 11 of
one with 8 matrices and small experts 3 µs; calibrated with published speeds."""

GPU_HOST_S = 50e-6
UNPACK_BYTES = 4.6
"""Per weight and batch: 0.6 read, 2 written, 2 read again, where matrices become FP16 first."""

DEQUANTISED_PART = 0.55 / (0.55 + 2 * 4)
"""Of the bandwidth, where each weight is written and read again as F32 for each token."""

RESERVED_BYTES = GIB // 2
"""Of a card without other programs: CUDA's own, and modules."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        name: as drivers call it, without the maker.
        memory_gib: what drivers report.
        gb_per_s: of its memory, in 10⁹ bytes.
        tflop_per_s: dense products in FP16 or BF16.
        f32_tflop_per_s: the same in F32.
        streaming: the part of the bandwidth that products with one token reach.
        pcie: generation and lanes.
        nvlink_gb_per_s: in one direction to all others together; 0 for none.
        has_peer_access: whether drivers let such cards read each other's memory over PCIe.
        n_cores: of a CPU; 0 for a GPU.
        capability: of CUDA, or "".
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

    @property
    def pcie_bytes_per_s(self) -> float:
        """In one direction."""
        return pcie_bytes_per_s(*self.pcie)

    def facts(self, device: str) -> DeviceFacts:
        """What a device of this kind can do."""
        bandwidth = 1e9 * self.gb_per_s * self.streaming
        flop = 1e12 * self.tflop_per_s * MATMUL_EFFICIENCY
        if self.n_cores:
            one = bandwidth / min(self.n_cores, CORES_PER_BANDWIDTH)
            return DeviceFacts(
                device, bandwidth, flop, CPU_OP_S, CPU_OP_S, CPU_HOST_S, self.n_cores, one,
                cache_part=CPU_CACHE_PART,
            )  # fmt: skip
        slow = bandwidth * DEQUANTISED_PART
        f32_flop = 1e12 * self.f32_tflop_per_s * MATMUL_EFFICIENCY
        rates = {
            DEQUANTISED: WeightRate(slow, slow, f32_flop),
            "F32": WeightRate(bandwidth, bandwidth, f32_flop),
        }
        return DeviceFacts(
            device, bandwidth, flop, OP_S, ROUTED_OP_S, GPU_HOST_S, unpack_bytes=UNPACK_BYTES,
            rates=rates,
        )  # fmt: skip


UNKNOWN_CPU_BYTES, UNKNOWN_CORE_FLOP = 50e9, 1.5e11
"""Bytes/s of memory in two channels, operations/s of one core: a guess until it is measured."""

CORES_PER_BANDWIDTH = 6
"""Cores that use up the memory's speed of a desktop computer, about; larger ones have more."""

CPU_OP_S, CPU_HOST_S = 12e-6, 5e-4
"""Of the CPU's kernels and of Python between them; see tests/bench/LOG.md."""


CPU_CACHE_PART = 0.6
"""Of what the CPU reads of weights, for keys and values in F16; see tests/bench/LOG.md."""


def pcie_bytes_per_s(generation: int, width: int) -> float:
    """Bytes/s of a slot in one direction, as programs see it."""
    lane = PCIE_LANE_BYTES[min(max(generation, 1), max(PCIE_LANE_BYTES))]
    return PCIE_EFFICIENCY * lane * width


GPU_SPECS = (
    DeviceSpec("RTX 3060", 12, 360, 25.5, 12.7, capability="8.6"),
    DeviceSpec("RTX 3070", 8, 448, 40.6, 20.3, capability="8.6"),
    DeviceSpec("RTX 3080", 10, 760, 59.5, 29.8, capability="8.6"),
    DeviceSpec("RTX 3090", 24, 936, 71, 35.6, nvlink_gb_per_s=56.25, capability="8.6"),
    DeviceSpec("RTX 4060 Ti 16GB", 16, 288, 44.1, 22.1, pcie=(4, 8), capability="8.9"),
    DeviceSpec("RTX 4070", 12, 504, 58.3, 29.1, capability="8.9"),
    DeviceSpec("RTX 4080", 16, 717, 97.5, 48.7, capability="8.9"),
    DeviceSpec("RTX 4090", 24, 1008, 165, 82.6, capability="8.9"),
    DeviceSpec("RTX 5070 Ti", 16, 896, 87.9, 43.9, pcie=(5, 16), capability="12.0"),
    DeviceSpec("RTX 5080", 16, 960, 112.6, 56.3, pcie=(5, 16), capability="12.0"),
    DeviceSpec("RTX 5090", 32, 1792, 209, 104.8, 0.82, (5, 16), capability="12.0"),
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
"""GPUs."""

CPU_SPECS = (
    DeviceSpec("Ryzen 9 7950X", 64, 83, 2.3, 2.3, n_cores=16),
    DeviceSpec("Ryzen 7 7800X3D", 64, 83, 1.1, 1.1, n_cores=8),
    DeviceSpec("Core i9-14900K", 64, 90, 1.8, 1.8, n_cores=24),
    DeviceSpec("EPYC 9654", 384, 461, 10.6, 10.6, n_cores=96),
)
"""CPUs with the memory of a usual machine, its fastest official one in all channels."""
