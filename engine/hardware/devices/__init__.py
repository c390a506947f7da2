"""The devices of this machine: which there are, how to name them, what state they are in.

    catalog.list_devices() -> [DeviceInfo]           GPUs by number, the CPU last
    catalog.cuda_status() -> str                     why no GPU can be used
    catalog.hidden_gpus() -> str                     which GPUs variables hide, or name in vain
    catalog.parse_devices("cpu,cuda:0") -> ids
    monitor.DeviceMonitor().snapshot() -> [DeviceSnapshot]
    topology.read_topology() -> Topology             PCIe slots of GPUs, connection of each pair

Reads psutil and the drivers: `nvml` for NVIDIA, `amd` for AMD, `other_gpus` where only torch or the
system can tell. Each describes and reads the GPUs that it finds; `catalog` decides which of them
torch can use, and under which number. Without a driver there is only the CPU. `torch_builds` names
the build of torch that a card needs. Imports no torch, and of the engine only `errors`.
"""
