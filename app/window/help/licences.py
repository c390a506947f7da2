"""Tandem's dependencies with their licences, from the metadata of installed packages.

Dependencies may be installed with Tandem or in the engine's folder. Package builds also use this
module, so it does not import Qt.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from app.core.translation import tr
from engine import package_version

PACKAGE = "tandem-llm"
ROOT = Path(__file__).parents[3]
PROJECT_FILE = ROOT / "pyproject.toml"
TEXTS = ROOT / "resources" / "licences"
"""Licence texts for packages that contain none, and for components that are not packages."""

ALONGSIDE = ("uv",)
"""Packages of bundled programs, which are not imported."""

LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
"""Prefixes of licence file names."""

LICENCE_FOLDERS = {"licenses", "licences", "license_files"}

LEFT_OUT = {
    "pyside6-essentials": ("LGPL-3.0", "GPL-3.0"),
    "shiboken6": ("LGPL-3.0", "GPL-3.0"),
    "tokenizers": ("Apache-2.0",),
    "latex2mathml": ("latex2mathml",),
    "nvidia-ml-py": ("nvidia-ml-py",),
}
"""Names of texts in `TEXTS` for packages that contain none."""

QT_TEXTS = ("LGPL-3.0", "GPL-3.0", "Qt-libraries")
PYTHON_TEXTS = ("Python-libraries", "Apache-2.0")
"""Names of texts in `TEXTS` for components that are not packages."""

FONT_VERSION = "3.19"


@dataclass(frozen=True, slots=True)
class Component:
    """A component that Tandem uses.

    Attributes:
        licence: name of its licence, as a single line.
        files: files with its licence texts, if it is not a package.
        notice: text that precedes the licence texts.
    """

    name: str
    version: str
    licence: str
    files: tuple[Path, ...] = ()
    notice: str = ""


def packages() -> list[Component]:
    """Return Tandem's installed dependencies, direct or not, by name; call it on a thread."""
    found: dict[str, Component] = {}
    waiting = [PACKAGE, *_direct(), *ALONGSIDE]
    while waiting:
        name = waiting.pop()
        key = plain_name(name)
        if key in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        title = package.metadata["Name"] or name
        found[key] = Component(title, package.version, licence_name(package.metadata))
        waiting += [_name_of(line) for line in package.requires or () if "extra ==" not in line]
    found.pop(PACKAGE, None)
    return sorted(found.values(), key=lambda component: component.name.lower())


def licence_text(component: Component) -> str:
    """Return a component's licence text, or ""."""
    if component.notice or component.files:
        return "\n\n".join([component.notice, *_read(component.files)]).strip()
    try:
        return package_text(metadata.distribution(component.name))
    except metadata.PackageNotFoundError:
        return ""


def package_text(package: metadata.Distribution) -> str:
    """Return a package's licence texts, or those in `TEXTS` if the package contains none."""
    named = set(package.metadata.get_all("License-File") or ())
    paths = []
    for file in package.files or ():
        is_named = any(str(file).endswith(f"/{name}") for name in named)
        begins = file.name.upper().startswith(LICENCE_FILES)
        is_kept_apart = ".dist-info" in str(file) and not LICENCE_FOLDERS.isdisjoint(file.parts)
        if (is_named or begins or is_kept_apart) and file.suffix not in (".py", ".pyc"):
            paths.append(Path(str(package.locate_file(file))))
    texts = _read(tuple(paths))
    return "\n\n".join(texts or _read(texts_for(package.metadata["Name"] or "")))


def texts_for(name: str) -> tuple[Path, ...]:
    """Return the files in `TEXTS` for a package."""
    return tuple(TEXTS / f"{text}.txt" for text in LEFT_OUT.get(plain_name(name), ()))


def licence_name(data: metadata.PackageMetadata) -> str:
    """Return a licence's name: its SPDX expression, or else its classifiers or first line."""
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


def plain_name(name: str) -> str:
    """Return a package's normalized name."""
    return name.lower().replace("_", "-").replace(".", "-")


def _read(paths: tuple[Path, ...]) -> list[str]:
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip("\n")
        except OSError:
            continue
        texts.append(f"— {path.name} —\n\n{text}" if len(paths) > 1 else text)
    return texts


def _direct() -> list[str]:
    if package_version() or not PROJECT_FILE.is_file():
        return []
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return [_name_of(line) for line in project["dependencies"]]


def _name_of(requirement: str) -> str:
    end = next((at for at, sign in enumerate(requirement) if sign in " ;<>=!~[("), None)
    return requirement[:end]
