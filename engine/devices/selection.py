"""From what a person writes to device ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.devices.catalog import cuda_status, list_devices
from engine.devices.types import DeviceInfo
from engine.errors import NoDevice

__all__ = ["parse_devices", "parse_target", "require_devices"]

GPU_ID = re.compile(r"(?:cuda|gpu):([0-9]+)")
RANK = re.compile(r"#[0-9]+")


def parse_devices(devices: str | Sequence[str]) -> list[str]:
    """Ids from "cpu,cuda:0" or a list; "gpu:N" is taken for "cuda:N". A repeated id stays repeated.

    Only the form is checked; `require_devices` says whether the devices are here.

    Raises:
        NoDevice: an entry has another form, or there is none.
    """
    entries = devices.split(",") if isinstance(devices, str) else devices
    ids = [_parse_device(entry) for entry in entries]
    if not ids:
        raise NoDevice("", "name at least one, such as cpu or cuda:0")
    return ids


def parse_target(target: str) -> str:
    """Where an override puts a part: the id of a device, or a rank as in "#1".

    Raises:
        NoDevice: it has another form.
    """
    name = target.strip()
    return f"#{int(name[1:])}" if RANK.fullmatch(name) else _parse_device(name)


def _parse_device(entry: str) -> str:
    name = entry.strip().lower()
    if name == "cpu":
        return name
    match = GPU_ID.fullmatch(name)
    if match is None:
        raise NoDevice(entry.strip(), "write cpu, or cuda:0 for the first GPU")
    return f"cuda:{int(match.group(1))}"


def require_devices(
    ids: Sequence[str], available: Sequence[DeviceInfo] | None = None
) -> list[DeviceInfo]:
    """The devices named, in the same order and as often.

    Args:
        available: from `list_devices`, which is asked when it is None.

    Raises:
        NoDevice: one is not here, or not usable; the message says why.
    """
    known = {info.id: info for info in (list_devices() if available is None else available)}
    for device in ids:
        if device not in known:
            raise NoDevice(device, _why_missing(list(known)))
        if not known[device].usable:
            raise NoDevice(device, known[device].reason.rstrip("."))
    return [known[device] for device in ids]


def _why_missing(known: list[str]) -> str:
    here = f"there is {', '.join(known)}"
    has_gpu = any(device.startswith("cuda") for device in known)
    return here if has_gpu else cuda_status().rstrip(".") or here
