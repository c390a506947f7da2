"""Versions: what this Tandem is made of, and runs on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

import PySide6
from PySide6.QtCore import qVersion

from app.core.translation import tr
from engine import DeviceInfo, package_version


def versions(devices: Sequence[DeviceInfo]) -> list[tuple[str, str]]:
    """Return what runs here, as pairs of names and versions; work for a thread."""
    drivers = {device.driver for device in devices if device.driver}
    return [
        ("Tandem", package_version() or tr("source tree")),
        ("Python", platform.python_version()),
        ("Qt", f"{qVersion()} (PySide6 {PySide6.__version__})"),
        ("PyTorch", _version_of("torch")),
        ("Triton", _version_of("triton") or _version_of("triton-windows")),
        (tr("GPU driver"), ", ".join(sorted(drivers)) or tr("none")),
        (tr("System"), f"{platform.system()} {platform.release()} ({platform.machine()})"),
    ]


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return tr("not installed") if name == "torch" else ""
