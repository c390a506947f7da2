"""The packages that Tandem is made of, with their licences, read from what is installed.

Packages are followed from Tandem's own requirements, wherever this Python finds them: beside
Tandem, or in the engine's own folder. Builds of packages use this as well, so it knows no Qt.
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
"""Folder of the texts that packages leave out, and of parts that are no packages."""

ALONGSIDE = ("uv",)
"""Packages of programs that come with Tandem, without being imported."""

LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
"""Beginnings of the names of files with the texts of licences."""

LICENCE_FOLDERS = {"licenses", "licences", "license_files"}

LEFT_OUT = {
    "pyside6-essentials": ("LGPL-3.0", "GPL-3.0"),
    "shiboken6": ("LGPL-3.0", "GPL-3.0"),
    "tokenizers": ("Apache-2.0",),
    "latex2mathml": ("latex2mathml",),
    "nvidia-ml-py": ("nvidia-ml-py",),
}
"""Names of texts in `TEXTS` for packages that bring none."""

QT_TEXTS = ("LGPL-3.0", "GPL-3.0", "Qt-libraries")
PYTHON_TEXTS = ("Python-libraries", "Apache-2.0")
"""Names of the texts for parts that are no packages."""

FONT_VERSION = "3.19"


@dataclass(frozen=True, slots=True)
class Component:
    """A package or another part that Tandem is made of.

    Attributes:
        licence: name of its licence, in one line.
        files: texts of the licences of a part that is no package.
        notice: what is said before these texts.
    """

    name: str
    version: str
    licence: str
    files: tuple[Path, ...] = ()
    notice: str = ""


def packages() -> list[Component]:
    """Return Tandem's dependencies and theirs, as they are installed here, by name.

    They are followed from the metadata of the packages; work for a thread.
    """
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
    """Return what is to be read about a component's licence; "" if nothing is known."""
    if component.notice or component.files:
        return "\n\n".join([component.notice, *_read(component.files)]).strip()
    try:
        return package_text(metadata.distribution(component.name))
    except metadata.PackageNotFoundError:
        return ""


def package_text(package: metadata.Distribution) -> str:
    """Return the texts of a package's licence files; those that are kept here if it has none."""
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
    """Return the files of the texts that a package leaves out."""
    return tuple(TEXTS / f"{text}.txt" for text in LEFT_OUT.get(plain_name(name), ()))


def licence_name(data: metadata.PackageMetadata) -> str:
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


def plain_name(name: str) -> str:
    """Return a package's name as all its spellings have it."""
    return name.lower().replace("_", "-").replace(".", "-")


def _read(paths: tuple[Path, ...]) -> list[str]:
    """Return the texts of files; each below its name where there are several."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip("\n")
        except OSError:
            continue
        texts.append(f"— {path.name} —\n\n{text}" if len(paths) > 1 else text)
    return texts


def _direct() -> list[str]:
    """Return the dependencies in a source tree that is not installed."""
    if package_version() or not PROJECT_FILE.is_file():
        return []
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return [_name_of(line) for line in project["dependencies"]]


def _name_of(requirement: str) -> str:
    """Return the name in a requirement such as "jinja2>=3; python_version > '3'"."""
    end = next((at for at, sign in enumerate(requirement) if sign in " ;<>=!~[("), None)
    return requirement[:end]
