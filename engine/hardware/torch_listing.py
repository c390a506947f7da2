"""Describes the GPUs that PyTorch finds; run as a program, lists them as one line of JSON.

PyTorch has one interface for CUDA and HIP, and calls GPUs of both "cuda:N".
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import torch

import engine.hardware.environment  # noqa: F401 - sets what torch reads when it is imported
from engine.hardware.devices.wheels import runs_on
from engine.util.programs import tie_to_parent

__all__ = ["arch_of", "has_code_for", "list_gpus", "pci_bus_of", "uuid_of", "why_none"]

HIP_UUID = re.compile(r"[0-9a-f]{16}")
"""Pattern of the 16 characters in which HIP gives a GPU's number."""


def uuid_of(properties: Any) -> str:
    """Return the UUID that the driver's own tools show, such as "GPU-…"; "" if unknown.

    HIP gives 16 characters in place of 16 bytes. A part of a GPU (MIG) has a UUID of another kind.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return ""
    if not torch.version.hip:
        return f"GPU-{uuid}"
    text = bytes(uuid.bytes).decode("ascii", errors="replace").lower()
    return f"GPU-{text}" if HIP_UUID.fullmatch(text) else ""


def pci_bus_of(properties: Any) -> str:
    """Return the PCI bus id, such as "00000000:01:00.0"; "" where torch does not tell."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(properties, name, None) for name in names)
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def arch_of(properties: Any) -> str:
    """Return the compute capability of a GPU such as "8.9", or AMD's name such as "gfx1100"."""
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"{properties.major}.{properties.minor}"


def has_code_for(arch: str) -> bool:
    """Return whether the installed torch has code for GPUs of this kind, see `arch_of`.

    It has if there is code for the same major version, or PTX, which the driver compiles for any
    newer GPU.
    """
    known = [name.partition(":")[0] for name in torch.cuda.get_arch_list()]
    if not known:  # it does not tell
        return True
    if torch.version.hip:
        return any(name == arch or "generic" in name for name in known)
    for name in known:
        kind, _, number = name.partition("_")
        digits, is_exact = number.rstrip("af"), number.endswith("a")  # "a" runs on no other GPU
        if not digits.isdigit():
            continue
        have = f"{digits[:-1]}.{digits[-1]}"
        is_ptx = kind == "compute" and digits == number and float(have) <= float(arch)
        if is_ptx or have == arch or (not is_exact and runs_on(have, arch)):
            return True
    return False


def why_none() -> str:
    """Return why torch finds no GPU, as the end of a sentence; "" if it finds some."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return ""


def list_gpus() -> dict[str, Any]:
    """Return the GPUs that torch finds, as arguments of `TorchGpu`, and why there are none."""
    problem = why_none()
    count = 0 if problem else torch.cuda.device_count()
    return {"gpus": [_describe(number) for number in range(count)], "problem": problem}


def _describe(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": "GPU", "total_bytes": 0, "free_bytes": 0}
    try:
        properties = torch.cuda.get_device_properties(number)
        kind = "arch" if torch.version.hip else "compute_capability"
        found |= {
            "name": properties.name, "total_bytes": properties.total_memory,
            "uuid": uuid_of(properties), "pci_bus": pci_bus_of(properties),
            kind: arch_of(properties),
        }  # fmt: skip
        found["free_bytes"] = torch.cuda.mem_get_info(number)[0]
    except RuntimeError as error:
        found["problem"] = f"PyTorch cannot open the GPU ({_first_line(error)})."
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def main() -> None:
    """Print the list; whatever else writes to the output comes before it."""
    tie_to_parent()  # a driver that hangs would keep it from noticing that nobody waits any more
    with contextlib.suppress(BrokenPipeError):
        print("\n" + json.dumps(list_gpus()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
