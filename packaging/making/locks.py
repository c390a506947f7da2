"""Lock files of the engine packs: which wheels of torch, and of what else only the engine imports.

packaging/lock [PACK ...]                              all packs of engine.toml, or some of them
packaging/lock PACK --mirror FOLDER                    a pack from files of an index out of reach
packaging/lock PACK --wheels FOLDER --out FILE         a pack from wheels that lie in a folder

A pack has what the engine needs and the window does not: the packages have the rest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from making.lock_file import LockedWheel, lock_text
from making.project import ROOT
from making.tree import window_requirements
from making.wheel_facts import folder_wheels, unpacked_size

TABLE = ROOT / "packaging" / "engine.toml"
GOAL = ROOT / "resources" / "engine"
PYPI = "https://pypi.org/simple"
MACOS = "14.0"
"""First macOS for which PyTorch builds wheels."""

CANONICAL = {"https://download-r2.pytorch.org/": "https://download.pytorch.org/"}
"""Addresses that PyTorch's index gives by turns for the same files."""


@dataclass(frozen=True, slots=True)
class PackSource:
    """A line of engine.toml.

    Attributes:
        name: backend and system, such as "cpu-linux-x86_64".
        python: version of Python.
        platform: system, in uv's words.
        marker: the same as a marker of PEP 508.
        index: package index of `packages`; "" where all come from PyPI.
        also: further requirements.
        extras: extras of pyproject.toml that belong to it.
        pypi: index of all others.
        mirror: folder with files of `index`, which is asked in its place.
    """

    name: str
    python: str
    platform: str
    marker: str
    index: str = ""
    packages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    pypi: str = PYPI
    mirror: Path | None = None

    @property
    def backend(self) -> str:
        return self.name.partition("-")[0]

    @property
    def system(self) -> str:
        return self.name.partition("-")[2]


def pack_names(table: Path = TABLE) -> list[str]:
    """Return the names of all packs of the table."""
    return [*tomllib.loads(table.read_text(encoding="utf-8"))["packs"]]


def read_source(name: str, table: Path = TABLE) -> PackSource:
    """Return what the table says of a pack.

    Raises:
        SystemExit: it says nothing of it.
    """
    known = tomllib.loads(table.read_text(encoding="utf-8"))
    platform = known["platforms"].get(name.partition("-")[2])
    if name not in known["packs"] or platform is None:
        raise SystemExit(f"{table.name} has no pack {name}; it has {', '.join(known['packs'])}.")
    pack = known["packs"][name]
    return PackSource(
        name, known["python"], *platform, index=pack.get("index", ""),
        packages=tuple(pack.get("packages", ())), also=tuple(pack.get("also", ())),
        extras=tuple(pack.get("extras", ())),
    )  # fmt: skip


def lock_pack(source: PackSource, all_wanted: Sequence[str], of_window: Sequence[str]) -> str:
    """Return the lock file of a pack.

    Args:
        all_wanted: requirements of engine and window.
        of_window: those of the window alone.

    Raises:
        SystemExit: an index cannot be reached, or has no wheels that fit together.
    """
    found = _resolve(source, [*all_wanted, *source.also])
    pins = [f"{package['name']}=={package['version']}" for package in found]
    window = {package["name"] for package in _resolve(source, of_window, pins)}
    wheels = [_locked(package, source) for package in found if package["name"] not in window]
    return lock_text(source, wheels)


def _resolve(
    source: PackSource, wanted: Sequence[str], pins: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the packages that some requirements lead to, as uv writes them.

    Args:
        pins: versions that those among them have to have.
    """
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        project.write_text(_project(source, wanted), encoding="utf-8")
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        goal = Path(folder) / "pylock.toml"
        done = subprocess.run(
            [
                find_uv(), "pip", "compile", "-q", "--format", "pylock.toml", "--generate-hashes",
                "--only-binary", ":all:", "--python-version", source.python, "--python-platform",
                source.platform, "--default-index", source.pypi, "--constraints", str(constraints),
                "-o", str(goal), str(project),
            ],
            env=_environment(), cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{source.name}: {done.stderr.strip()[-1500:]}")
        packages: list[dict[str, Any]] = tomllib.loads(goal.read_text("utf-8"))["packages"]
        return packages


def _project(source: PackSource, wanted: Sequence[str]) -> str:
    """Return a project with some requirements, of which uv takes some from another index."""
    lines = [
        "[project]", 'name = "engine-pack"', 'version = "0"',
        f'requires-python = "=={source.python}.*"', "dependencies = [",
        *(f"  {_quoted(line)}," for line in wanted), "]",
    ]  # fmt: skip
    if source.index:
        mirror = source.mirror
        lines += [
            "[[tool.uv.index]]", 'name = "other"',
            f"url = {_quoted(mirror.as_uri() if mirror else source.index)}",
            *(('format = "flat"',) if mirror else ()), "explicit = true", "[tool.uv.sources]",
            *(f'{name} = {{ index = "other" }}' for name in source.packages),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _environment() -> dict[str, str]:
    """Return the environment without settings of package indexes on this machine."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    return own | {"MACOSX_DEPLOYMENT_TARGET": MACOS}


def _locked(package: Mapping[str, Any], source: PackSource) -> LockedWheel:
    """Return the wheel of a package, with its size before and after unpacking.

    Raises:
        SystemExit: it has none, or several, or one without a hash.
    """
    name, wheels = package["name"], package.get("wheels", [])
    if len(wheels) != 1 or "sha256" not in wheels[0].get("hashes", {}):
        raise SystemExit(f"{name} {package['version']} has not exactly one wheel with a SHA-256.")
    url = str(wheels[0]["url"])
    if source.mirror and url.startswith(source.mirror.as_uri()):
        return _mirrored(name, source.index, source.mirror)
    for other, canonical in CANONICAL.items():
        if url.startswith(other):
            url = canonical + url.removeprefix(other)
    size, unpacked = unpacked_size(url)
    return LockedWheel(
        name, package["version"], url, "", size, wheels[0]["hashes"]["sha256"], unpacked
    )


def _mirrored(name: str, index: str, mirror: Path) -> LockedWheel:
    """Return a wheel of a mirror under the address that its index has for it."""
    (wheel,) = (wheel for wheel in folder_wheels(mirror) if wheel.name == name)
    return replace(wheel, url=f"{index}/{quote(wheel.file)}", file="")


def find_uv() -> str:
    """Return the program uv.

    Raises:
        SystemExit: there is none.
    """
    beside = shutil.which("uv", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("uv")
    if found is None:
        raise SystemExit('uv is missing: pip install "uv>=0.13,<0.14"')
    return found


def requirements(extras: Sequence[str] = ()) -> list[str]:
    """Return the requirements of pyproject.toml, with those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *more]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="packaging/lock", description="Lock engine packs.")
    parser.add_argument("packs", nargs="*", metavar="PACK", help="all of engine.toml if none")
    parser.add_argument("--wheels", type=Path, help="folder whose wheels make the pack")
    parser.add_argument("--mirror", type=Path, help="folder with files of the pack's own index")
    parser.add_argument("--out", type=Path, help="file to write, with --wheels")
    args = parser.parse_args(arguments)
    if args.wheels:
        if len(args.packs) != 1 or args.out is None:
            parser.error("--wheels needs one PACK and --out")
        source = read_source(args.packs[0])
        args.out.write_text(lock_text(source, folder_wheels(args.wheels)), encoding="utf-8")
        return
    failed = []
    for name in args.packs or pack_names():
        try:
            source = replace(read_source(name), mirror=args.mirror and args.mirror.resolve())
            text = lock_pack(source, requirements(source.extras), window_requirements())
        except (SystemExit, OSError) as error:
            failed.append(name)
            sys.stderr.write(f"{name} is not renewed: {error}\n")
            continue
        path = GOAL / f"pylock.{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
