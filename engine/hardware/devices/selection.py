"""Parses the device names that a person writes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import NoDevice
from engine.hardware.devices.catalog import cuda_status, list_devices
from engine.hardware.devices.places import far_id
from engine.hardware.devices.stopped import require_running
from engine.hardware.devices.types import DeviceInfo

__all__ = ["parse_devices", "parse_target", "require_devices"]

GPU_ID = re.compile(r"(?:cuda|gpu):([0-9]+)")
UUID = re.compile(r"gpu-[0-9a-f][0-9a-f-]*")
FAR = re.compile(r"[0-9]{1,3}/(?:cpu|(?:cuda|gpu):[0-9]+)")
RANK = re.compile(r"#[0-9]+")


def parse_devices(devices: str | Sequence[str]) -> list[str]:
    """Return the ids in "cpu,cuda:0" or a list; a repeated id stays repeated.

    "gpu:N" means "cuda:N". A GPU may also be named by its UUID, "GPU-…", or by a prefix of it that
    fits no other GPU; "1/cuda:0" is a device of another machine. Other names are checked for their
    form alone; `require_devices` checks that they exist.

    Raises:
        NoDevice: an entry has another form or is the UUID of no GPU or of several, or there is no
            entry.
    """
    entries = devices.split(",") if isinstance(devices, str) else devices
    ids = [_parse_device(entry) for entry in entries]
    if not ids:
        raise NoDevice("", "name at least one, such as cpu or cuda:0")
    return ids


def parse_target(target: str) -> str:
    """Return the target of an override: the id of a device, or a rank such as "#1".

    Raises:
        NoDevice: see `parse_devices`.
    """
    name = target.strip()
    return f"#{int(name[1:])}" if RANK.fullmatch(name) else _parse_device(name)


def _parse_device(entry: str) -> str:
    name = entry.strip().lower()
    if name == "cpu":
        return name
    if name.startswith("mig-"):
        raise NoDevice(entry.strip(), "a part of a GPU cannot be used; name the whole GPU")
    if UUID.fullmatch(name):
        return _by_uuid(entry.strip())
    if FAR.fullmatch(name):
        machine, _, device = name.partition("/")
        return far_id(int(machine), _parse_device(device))
    match = GPU_ID.fullmatch(name)
    if match is None:
        raise NoDevice(entry.strip(), "write cpu, or cuda:0 for the first GPU, or a GPU's UUID")
    return f"cuda:{int(match.group(1))}"


def _by_uuid(beginning: str) -> str:
    """Return the id of the GPU whose UUID has this prefix, in upper or lower case."""
    known = list_devices()
    found = [d.id for d in known if d.uuid.lower().startswith(beginning.lower())]
    if len(found) > 1:
        both = " and ".join(found)
        raise NoDevice(beginning, f"the UUIDs of {both} begin so; write a longer part")
    if not found:
        here = ", ".join(f"{d.id} with {d.uuid}" for d in known if d.uuid)
        raise NoDevice(beginning, f"there is {here}" if here else _why_missing(["cpu"]))
    return found[0]


def require_devices(
    ids: Sequence[str], available: Sequence[DeviceInfo] | None = None
) -> list[DeviceInfo]:
    """Return the devices with these ids, in the same order and as often.

    Args:
        available: all devices; None to call `list_devices`.

    Raises:
        NoDevice: one does not exist or is not usable; the message says why.
        DeviceStopped: one has stopped working in this process.
    """
    for device in ids:
        require_running(device)
    known = {info.id: info for info in (list_devices() if available is None else available)}
    for device in ids:
        if device not in known:
            raise NoDevice(device, _why_missing(list(known)))
        if not known[device].usable:
            raise NoDevice(device, known[device].reason.rstrip("."), known[device].remedy)
    return [known[device] for device in ids]


def _why_missing(known: list[str]) -> str:
    here = f"there is {', '.join(known)}"
    has_gpu = any(device.startswith("cuda") for device in known)
    return here if has_gpu else cuda_status().rstrip(".") or here
