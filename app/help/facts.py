"""Versions and licences: what this Tandem is made of, and runs on."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import PySide6
from PySide6.QtCore import qVersion

from app.translation import tr
from engine import DeviceInfo, package_version

PACKAGE = "tandem-llm"

PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"

LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
"""Beginnings of the names of files with the texts of licences."""


@dataclass(frozen=True, slots=True)
class Component:
    """A package that Tandem is made of.

    Args:
        licence: name of its licence, in one line.
    """

    name: str
    version: str
    licence: str


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


def components() -> list[Component]:
    """Return Tandem's dependencies and theirs, as they are installed here, by name.

    They are followed from the metadata of the packages; work for a thread.
    """
    found: dict[str, Component] = {}
    waiting = [PACKAGE, *_direct()]
    while waiting:
        name = waiting.pop()
        key = name.lower().replace("_", "-")
        if key in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        title = package.metadata["Name"] or name
        found[key] = Component(title, package.version, _licence(package.metadata))
        waiting += [_name_of(line) for line in package.requires or () if "extra ==" not in line]
    found.pop(PACKAGE, None)
    return sorted(found.values(), key=lambda component: component.name.lower())


def licence_text(name: str) -> str:
    """Return the texts of a package's licence files; "" if it brings none."""
    texts = []
    for file in metadata.files(name) or ():
        if file.name.upper().startswith(LICENCE_FILES) and file.suffix not in (".py", ".pyc"):
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
    return "\n\n".join(texts)


def _direct() -> list[str]:
    """Return the dependencies in a source tree that is not installed."""
    if package_version() or not PROJECT_FILE.is_file():
        return []
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return [_name_of(line) for line in project["dependencies"]]


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return tr("not installed") if name == "torch" else ""


def _licence(data: metadata.PackageMetadata) -> str:
    """Return the name of a licence: the SPDX expression, else the classifiers, else one line."""
    if "License-Expression" in data:
        return data["License-Expression"]
    kinds = [
        line.rpartition(" :: ")[2]
        for line in data.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    if kinds:
        return ", ".join(kinds)
    lines = data["License"].strip().splitlines() if "License" in data else []
    return lines[0] if lines else tr("not stated")


def _name_of(requirement: str) -> str:
    """Return the name in a requirement such as "jinja2>=3; python_version > '3'"."""
    end = next((at for at, sign in enumerate(requirement) if sign in " ;<>=!~[("), None)
    return requirement[:end]
