"""Reads how GPUs are connected: PCIe slots, NVLink and peer access. Imports no torch.

An idle GPU often switches its slot to a lower PCIe generation, which is then reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Literal

from engine.errors import DeviceError, Sentence
from engine.hardware.devices.catalog import numbered_gpus
from engine.hardware.devices.nvml import Gpu, Nvml

log = logging.getLogger(__name__)

LinkKind = Literal["nvlink", "p2p", "host"]
"""Fastest route between two GPUs: NVLink, peer access over PCIe, or host memory."""

ANCESTORS: Mapping[int, str] = {
    0: "the same board", 10: "one PCIe switch", 20: "several PCIe switches",
    30: "one host bridge", 40: "several host bridges of one CPU", 50: "several CPUs",
}  # fmt: skip
"""NVML's levels of the closest common ancestor of two GPUs, NVML_TOPOLOGY_…"""

PEER_READ, PEER_WRITE, PEER_NVLINK = 0, 1, 2
"""NVML_P2P_CAPS_INDEX_…; literals, because the Python binding has a tuple instead of the first."""

PEER_PROBLEMS: Mapping[int, Sentence] = {
    1: Sentence("the chipset does not support it"), 2: Sentence("these GPUs do not support it"),
    3: Sentence("the route between them does not support it"),
    4: Sentence("the driver's settings forbid it"), 5: Sentence("it is not supported"),
}  # fmt: skip
"""Texts for NVML_P2P_STATUS_… other than OK (0) and UNKNOWN."""

MAX_NVLINKS = 36
"""Maximum number of NVLinks per GPU."""


@dataclass(frozen=True, slots=True)
class Pcie:
    """A GPU's PCIe slot: current and maximum generation and width; 0 if unknown."""

    generation: int = 0
    width: int = 0
    max_generation: int = 0
    max_width: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two GPUs.

    Attributes:
        n_nvlink: number of NVLinks between them, or from one of them to a common switch.
        nvlink_version: version of these links; 0 if there are none or it is unknown.
        ancestor: closest common ancestor, in words; "" if unknown.
        peer_problem: why the GPUs have no peer access; "" if they do.
    """

    a: str
    b: str
    kind: LinkKind
    n_nvlink: int = 0
    nvlink_version: int = 0
    ancestor: str = ""
    peer_problem: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs that CUDA shows to this process: slots by id, and the link between each pair."""

    pcie: Mapping[str, Pcie]
    links: tuple[Link, ...]


def read_topology() -> Topology:
    """Return the topology as reported by the driver; empty if there is no driver."""
    try:
        with Nvml() as nvml:
            gpus = {name: gpu for name, gpu in numbered_gpus(nvml).items() if not gpu.problem}
            pcie = {name: _pcie(nvml, gpu) for name, gpu in gpus.items()}
            pairs = combinations(gpus.items(), 2)
            links = [_link(nvml, a, b, gpu_a, gpu_b) for (a, gpu_a), (b, gpu_b) in pairs]
            return Topology(pcie, tuple(links))
    except DeviceError as error:
        log.info("no links are listed: %s", error)
        return Topology({}, ())


def _pcie(nvml: Nvml, gpu: Gpu) -> Pcie:
    names = ("Curr{}Generation", "Curr{}Width", "Max{}Generation", "Max{}Width")
    functions = [f"nvmlDeviceGet{name.format('PcieLink')}" for name in names]
    return Pcie(*(int(nvml.ask(function, gpu.handle) or 0) for function in functions))


def _link(nvml: Nvml, a: str, b: str, gpu_a: Gpu, gpu_b: Gpu) -> Link:
    n_nvlink, version = _nvlinks(nvml, gpu_a, gpu_b)
    problem = _peer_problem(nvml, gpu_a, gpu_b)
    kind: LinkKind = "host" if problem else "nvlink" if n_nvlink else "p2p"
    level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", gpu_a.handle, gpu_b.handle)
    ancestor = "" if level is None else ANCESTORS.get(int(level), "")
    return Link(a, b, kind, n_nvlink, version, ancestor, problem)


def _peer_problem(nvml: Nvml, gpu_a: Gpu, gpu_b: Gpu) -> str:
    for index in (PEER_READ, PEER_WRITE):
        for one, other in ((gpu_a, gpu_b), (gpu_b, gpu_a)):
            status = nvml.ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, index)
            if status != 0:
                unknown = Sentence("the driver does not report it")
                return unknown if status is None else PEER_PROBLEMS.get(int(status), unknown)
    return ""


def _nvlinks(nvml: Nvml, gpu_a: Gpu, gpu_b: Gpu) -> tuple[int, int]:
    active = [
        link for link in range(MAX_NVLINKS)
        if nvml.ask("nvmlDeviceGetNvLinkState", gpu_a.handle, link)
    ]  # fmt: skip
    ends = [nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", gpu_a.handle, link) for link in active]
    direct = [
        link for link, end in zip(active, ends, strict=True)
        if end is not None and _same_bus(_text(end.busId), gpu_b.pci_bus)
    ]  # fmt: skip
    used = direct
    if not direct and active:
        status = nvml.ask("nvmlDeviceGetP2PStatus", gpu_a.handle, gpu_b.handle, PEER_NVLINK)
        used = active if status == 0 else []  # through a switch
    if not used:
        return 0, 0
    version = nvml.ask("nvmlDeviceGetNvLinkVersion", gpu_a.handle, used[0])
    return len(used), int(version or 0)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _same_bus(a: str, b: str) -> bool:
    # the domain may have four or eight digits
    parts = [bus.upper().partition(":") for bus in (a, b)]
    return parts[0][2] == parts[1][2] and parts[0][0][-4:] == parts[1][0][-4:]


Pair = tuple[str, str]
"""Ids of the sending and the receiving device."""

Place = Literal["device", "peer", "host"]
"""Memory through which one device sends to another: that of the device both ranks share, that of
the receiving device ("peer"), or pinned host memory."""


@dataclass(frozen=True, slots=True)
class Way:
    """The route by which one GPU sends values to another.

    Attributes:
        stores: memory that kernels may write small messages to; None if impossible.
        copies: memory that large messages are copied to.
    """

    stores: Place | None = "host"
    copies: Place = "host"


BY_HOST = Way()
ON_ONE_DEVICE = Way("device", "device")


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes between all pairs of GPUs.

    Attributes:
        pairs: known routes; all other pairs go through host memory.
        has_nccl: whether NCCL may replace copies.
        notes: sentences for the user.
    """

    pairs: Mapping[Pair, Way] = field(default_factory=dict)
    has_nccl: bool = False
    notes: tuple[str, ...] = ()

    def between(self, source: str, target: str) -> Way:
        """Return the route from one device to another."""
        if source == target:
            return ON_ONE_DEVICE
        return self.pairs.get((source, target), BY_HOST)

    def have_stores(self, devices: Iterable[str]) -> bool:
        """Return whether kernels on each of the devices may write to all others."""
        pairs = permutations(devices, 2)
        return all(self.between(*pair).stores is not None for pair in pairs)
