"""The devices of this machine: their list, names and state.

    catalog.list_devices() -> [DeviceInfo]           GPUs by number, the CPU last
    catalog.cuda_status() -> str                     why no GPU can be used
    catalog.hidden_gpus() -> str                     which GPUs variables hide or fail to select
    catalog.parse_devices("cpu,cuda:0") -> ids
    monitor.DeviceMonitor().snapshot() -> [DeviceSnapshot]
    topology.read_topology() -> Topology             the GPUs' PCIe slots, and links between them

Sources are psutil and the drivers: `nvml` for NVIDIA, `amd` for AMD, `other_gpus` for GPUs that
only torch or the system lists. `catalog` decides which GPUs torch can use, and under which numbers.
`torch_builds` names the torch build for a card. Imports no torch, and from the engine only
`errors`.
"""
