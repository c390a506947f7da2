"""The devices of this machine: which there are, how to name them, what state they are in.

    list_devices() -> [DeviceInfo]       GPUs by number, the CPU last
    cuda_status() -> str                 why no GPU can be used
    hidden_gpus() -> str                 which GPUs variables hide, or name in vain
    parse_devices("cpu,cuda:0") -> ids
    DeviceMonitor().snapshot() -> [DeviceSnapshot]
    read_topology() -> Topology          PCIe slots of GPUs, and the connection of each pair

Reads psutil and what `drivers` tell; without a driver there is only the CPU. `wheels` says which
build of torch a card needs. Imports no torch, and of the engine only `errors`.
"""

from engine.devices.catalog import cuda_status, hidden_gpus, list_devices
from engine.devices.links import Link, Pcie, Topology, read_topology
from engine.devices.monitor import DeviceMonitor
from engine.devices.selection import parse_devices, parse_target, require_devices
from engine.devices.types import DeviceInfo, DeviceKind, DeviceSnapshot

__all__ = [
    "DeviceInfo",
    "DeviceKind",
    "DeviceMonitor",
    "DeviceSnapshot",
    "Link",
    "Pcie",
    "Topology",
    "cuda_status",
    "hidden_gpus",
    "list_devices",
    "parse_devices",
    "parse_target",
    "read_topology",
    "require_devices",
]
