"""Finds the makers of this machine's display adapters, whether or not their drivers work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GpuMaker = Literal["nvidia", "amd", "intel", "apple"]

MAKERS: Mapping[str, GpuMaker] = {"10de": "nvidia", "1002": "amd", "8086": "intel"}
"""Makers by PCI vendor."""

PCI = Path("/sys/bus/pci/devices")
"""Folder of Linux's files on PCI devices."""

DISPLAY_CLASS = "0x03"
"""Beginning of the PCI class of display controllers."""

REGISTRY = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
"""Key under which Windows lists display adapters, in keys such as 0000."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A display adapter; Linux tells neither `name` nor `total_bytes`, which are then "" and 0."""

    maker: GpuMaker
    name: str = ""
    total_bytes: int = 0


def find_adapters() -> list[Adapter]:
    """Return the display adapters of known makers."""
    if sys.platform == "win32":
        return _adapters_of_windows()
    if sys.platform == "darwin":
        return [Adapter("apple")]
    try:
        folders = sorted(PCI.iterdir())
    except OSError:
        return []
    vendors = [_word(folder / "vendor") for folder in folders if _is_display(folder)]
    return [Adapter(MAKERS[v]) for v in (v.removeprefix("0x") for v in vendors) if v in MAKERS]


def _is_display(folder: Path) -> bool:
    return _word(folder / "class").startswith(DISPLAY_CLASS)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""


def _adapters_of_windows() -> list[Adapter]:
    found: list[Adapter] = []
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY) as adapters:
                n_keys = winreg.QueryInfoKey(adapters)[0]
                for key in (winreg.EnumKey(adapters, index) for index in range(n_keys)):
                    if key.isdigit():
                        with winreg.OpenKey(adapters, key) as adapter:
                            values = _values(winreg, adapter)
                        found += _adapter_of(values)
        except OSError:
            return found
    return found


def _values(winreg: object, key: object) -> dict[str, object]:
    """Return the values of a registry key that can be read, by name."""
    query = winreg.QueryValueEx  # type: ignore[attr-defined]
    found: dict[str, object] = {}
    for name in ("DriverDesc", "MatchingDeviceId", "HardwareInformation.qwMemorySize"):
        try:
            found[name] = query(key, name)[0]
        except OSError:
            continue
    return found


def _adapter_of(values: Mapping[str, object]) -> list[Adapter]:
    r"""Return the adapter of a registry key with these values, or none.

    MatchingDeviceId has the PCI vendor: "PCI\VEN_10DE&DEV_2684".
    """
    vendor = str(values.get("MatchingDeviceId", "")).lower().partition("ven_")[2][:4]
    if vendor not in MAKERS:
        return []
    size = values.get("HardwareInformation.qwMemorySize", 0)
    name = str(values.get("DriverDesc", ""))
    return [Adapter(MAKERS[vendor], name, size if isinstance(size, int) else 0)]
