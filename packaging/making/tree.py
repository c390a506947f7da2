"""The folder that every package holds: Python, the window's libraries, Tandem, and uv.

    python/   a private CPython
    site/     libraries of the window, without torch
    src/      app, engine, resources, with their metadata
    bin/      tandem, uv
    LICENCES.txt

Everything finds the rest by its own place, so the folder may lie anywhere.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

from making.files import delete_matching
from making.libraries import elf_files, needed_libraries
from making.licences import check_parts, licences_text, shipped_parts
from making.project import ROOT, Project, output
from making.qt import prune_qt

ENGINE_ONLY = ("torch", "llvmlite", "tokenizers")
"""Requirements that only the engine imports: they come with its own pack."""

UNUSED_PYTHON = (
    "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages",
    "pydoc_data", "__phello__",
)  # fmt: skip
"""Parts of Python's library that Tandem never imports."""

UNUSED_ANYWHERE = ("__pycache__", "test", "tests")
UNUSED_MODULES = (
    "_tkinter", "_test", "_ctypes_test", "xxlimited", "_xxtestfuzz", "nis", "audioop",
    "ossaudiodev", "readline", "_curses", "_crypt", "_dbm", "_gdbm",
)  # fmt: skip
UNUSED_IN_WHEELS = ("**/tests", "**/*.a", "pyqtgraph/examples", "shiboken6/include", "bin")
"""What is left out of the window's libraries: tests, examples, and what only compilers read."""

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "app", "engine", "resources")
"""Files and folders of the checkout that Tandem is built from."""

UV = "uv>=0.13,<0.14"

LAUNCHER = """#!/bin/sh
# Starts Tandem with the Python beside it, whatever the person's own Python is set to.
here=$(dirname "$(readlink -f "$0")")/..
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
exec "$here/python/bin/python3" -P -m app "$@"
"""


def make_tree(folder: Path, project: Project, python: Path) -> None:
    """Fill an empty folder.

    Args:
        python: prefix of the CPython to pack, best a relocatable one of python-build-standalone.
    """
    copy_python(python, folder / "python")
    install_libraries(folder / "site")
    prune_qt(folder / "site" / "PySide6")
    install_tandem(folder / "src")
    install_uv(folder / "bin")
    for part in ("site", "src"):
        tidy_install_records(folder / part)
    launcher = folder / "bin" / "tandem"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    packages = next((folder / "python" / "lib").glob("python3.*")) / "site-packages"
    packages.mkdir()
    up = "../" * 4
    (packages / "tandem.pth").write_text(f"{up}src\n{up}site\n")
    write_licences(folder, project)
    compile_all(folder)
    settle(folder, project.epoch)


def copy_python(prefix: Path, target: Path) -> None:
    """Copy a CPython without what Tandem never needs."""
    library = next((prefix / "lib").glob("python3.*[0-9]"))
    name = library.name

    def is_unused(folder: str, names: list[str]) -> set[str]:
        unused = {n for n in names if n in UNUSED_ANYWHERE or n.startswith("config-3")}
        if Path(folder) == library:
            unused |= set(UNUSED_PYTHON) & set(names)
        if Path(folder).name == "lib-dynload":
            unused |= {n for n in names if n.startswith(UNUSED_MODULES)}
        return unused

    shutil.copytree(library, target / "lib" / name, ignore=is_unused, symlinks=True)
    for shared in (prefix / "lib").glob("libpython3*.so*"):
        shutil.copy2(shared, target / "lib" / shared.name, follow_symlinks=False)
    (target / "bin").mkdir()
    shutil.copy2(prefix / "bin" / name, target / "bin" / name)
    for link in ("python3", "python"):
        (target / "bin" / link).symlink_to(name)
    headers = prefix / "include" / name  # Triton compiles its launchers with them
    shutil.copytree(headers, target / "include" / name)
    for path in elf_files(target):
        output("strip", "--strip-unneeded", str(path))
        library = os.path.relpath(target / "lib", path.parent)
        if any(needed.startswith("libpython") for needed in needed_libraries(path)):
            output("patchelf", "--set-rpath", f"$ORIGIN/{library}", str(path))
        elif path.suffix == ".so" or ".so." in path.name:
            output("patchelf", "--remove-rpath", str(path))


def window_requirements() -> list[str]:
    """Return the requirements of pyproject.toml that the window's process needs."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted: list[str] = tomllib.load(file)["project"]["dependencies"]
    return [line for line in wanted if not line.startswith(ENGINE_ONLY)]


def install_libraries(target: Path) -> None:
    """Install the window's libraries as wheels, without what Tandem does not use."""
    pip("install", "--target", str(target), *window_requirements())
    delete_matching(target, UNUSED_IN_WHEELS)
    for folder in sorted(path for path in target.rglob("*") if path.is_dir())[::-1]:
        if not any(folder.iterdir()):
            folder.rmdir()


def install_tandem(target: Path) -> None:
    """Install Tandem itself, with its metadata.

    From a copy, since setuptools leaves in the checkout what it has built, and would pack modules
    that are long gone.
    """
    work = target.with_name("sources")
    work.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, work / name, ignore=ignored)
        else:
            shutil.copy(source, work / name)
    pip("install", "--target", str(target), "--no-deps", str(work))
    shutil.rmtree(work)
    shutil.rmtree(target / "bin", ignore_errors=True)


def write_licences(folder: Path, project: Project) -> None:
    """Write the licences of all that is in a tree, and where an installed Tandem asks for releases.

    Raises:
        SystemExit: a part has no name or no text of its licence, or the address is none.
    """
    parts = shipped_parts(folder, project)
    check_parts(parts)
    (folder / "LICENCES.txt").write_text(licences_text(parts), encoding="utf-8")
    address = os.environ.get("TANDEM_RELEASE_ADDRESS", "")
    if address and not address.startswith("https://"):
        raise SystemExit("TANDEM_RELEASE_ADDRESS does not begin with https://.")
    if address:
        file = folder / "src" / "resources" / "release-address.txt"
        file.write_text(f"{address}\n", encoding="utf-8")


def install_uv(target: Path) -> None:
    """Put uv, which fetches the engine, into a folder, and its metadata beside the libraries."""
    work = target.with_name("uv-wheel")
    pip("install", "--target", str(work), "--no-deps", UV)
    target.mkdir()
    shutil.move(work / "bin" / "uv", target / "uv")
    for metadata in work.glob("uv-*.dist-info"):
        shutil.move(metadata, target.with_name("site") / metadata.name)
    shutil.rmtree(work)


def pip(*arguments: str) -> None:
    """Run pip of the Python that builds; of what it fetches only wheels are taken."""
    output(
        sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments,
        "--no-compile", "--only-binary", ":all:",
    )  # fmt: skip


def compile_all(folder: Path) -> None:
    """Write byte code that is valid as long as the package is: nobody can write it later.

    A fresh process compiles each folder (`-B`, else it writes its own modules with times), so that
    the same sources give the same bytes.
    """
    python = folder / "python" / "bin" / "python3"
    for part in ("python/lib", "site", "src"):
        output(
            str(python), "-I", "-B", "-m", "compileall", "-q",
            "--invalidation-mode", "unchecked-hash", "-s", str(folder), str(folder / part),
        )  # fmt: skip


def tidy_install_records(site: Path) -> None:
    """Remove what pip notes about this machine, and from lists of files those that are gone."""
    for name in ("INSTALLER", "REQUESTED", "direct_url.json"):
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="") as file:
            rows = [row for row in csv.reader(file) if (site / row[0]).is_file()]
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(sorted(rows))


def settle(folder: Path, epoch: int) -> None:
    """Give all files plain rights and the commit's time."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or _is_program(path) else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _is_program(path: Path) -> bool:
    """Return whether a file is meant to be started, which libraries and modules are not."""
    return bool(path.stat().st_mode & 0o100) and path.suffix != ".py" and ".so" not in path.name
