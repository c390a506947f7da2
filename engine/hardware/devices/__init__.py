"""The devices of this machine: which there are, how to name them, what state they are in.

    catalog.list_devices() -> [DeviceInfo]           GPUs by number, the CPU last
    catalog.cuda_status() -> str                     why no GPU can be used
    catalog.hidden_gpus() -> str                     which GPUs variables hide, or name in vain
    selection.parse_devices("cpu,cuda:0") -> ids
    monitor.DeviceMonitor().snapshot() -> [DeviceSnapshot]
    links.read_topology() -> Topology                PCIe slots of GPUs, connection of each pair

Reads psutil and what `drivers` tell; without a driver there is only the CPU. `wheels` says which
build of torch a card needs. Imports no torch, and of the engine only `errors`.
"""
