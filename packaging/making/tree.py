"""The folder that every package holds: Python, the window's libraries, Tandem, and uv.

    python/   a private CPython
    site/     libraries of the window, without torch
    src/      app, engine, resources, with their metadata
    bin/      tandem, uv

Everything finds the rest by its own place, so the folder may lie anywhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from making.project import ROOT, Project, output
from making.qt import prune_qt

ENGINE_ONLY = ("torch", "llvmlite", "tokenizers")
"""Requirements that only the engine imports: they come with its own pack."""

UNUSED_PYTHON = (
    "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages",
    "pydoc_data", "__phello__",
)  # fmt: skip
"""Parts of Python's library that Tandem never imports."""

UNUSED_MODULES = ("_tkinter", "_test", "_ctypes_test", "xxlimited", "nis", "audioop", "ossaudiodev")
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
    launcher = folder / "bin" / "tandem"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    packages = next((folder / "python" / "lib").glob("python3.*")) / "site-packages"
    packages.mkdir()
    up = "../" * 4
    (packages / "tandem.pth").write_text(f"{up}src\n{up}site\n")
    compile_all(folder)
    settle(folder, project.epoch)


def copy_python(prefix: Path, target: Path) -> None:
    """Copy a CPython without what Tandem never needs."""
    library = next((prefix / "lib").glob("python3.*[0-9]"))
    name = library.name

    def is_unused(folder: str, names: list[str]) -> set[str]:
        unused = {n for n in names if n == "__pycache__" or n.startswith("config-3")}
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
    if output("file", "-b", str(target / "bin" / name)).find("dynamically linked") >= 0:
        output("patchelf", "--set-rpath", "$ORIGIN/../lib", str(target / "bin" / name))


def window_requirements() -> list[str]:
    """Return the requirements of pyproject.toml that the window's process needs."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted: list[str] = tomllib.load(file)["project"]["dependencies"]
    return [line for line in wanted if not line.startswith(ENGINE_ONLY)]


def install_libraries(target: Path) -> None:
    """Install the window's libraries as wheels, without programs and tests."""
    pip("install", "--target", str(target), *window_requirements())
    shutil.rmtree(target / "bin", ignore_errors=True)
    for name in ("numpy", "pyqtgraph"):
        for tests in [*sorted((target / name).rglob("tests")), target / name / "examples"]:
            shutil.rmtree(tests, ignore_errors=True)


def install_tandem(target: Path) -> None:
    """Install Tandem itself, with its metadata."""
    pip("install", "--target", str(target), "--no-deps", str(ROOT))
    shutil.rmtree(target / "bin", ignore_errors=True)


def install_uv(target: Path) -> None:
    """Put uv, which fetches the engine, into a folder."""
    work = target.with_name("uv-wheel")
    pip("install", "--target", str(work), "--no-deps", UV)
    target.mkdir()
    shutil.move(work / "bin" / "uv", target / "uv")
    shutil.rmtree(work)


def pip(*arguments: str) -> None:
    """Run pip of the Python that builds; only wheels are taken, so nothing is compiled here."""
    output(
        sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments,
        "--no-compile", *(() if str(ROOT) in arguments else ("--only-binary", ":all:")),
    )  # fmt: skip


def compile_all(folder: Path) -> None:
    """Write byte code that is valid as long as the package is: nobody can write it later."""
    python = folder / "python" / "bin" / "python3"
    output(
        str(python), "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode",
        "unchecked-hash", "-s", str(folder), str(folder / "python" / "lib"),
        str(folder / "site"), str(folder / "src"),
    )  # fmt: skip


def settle(folder: Path, epoch: int) -> None:
    """Give all files plain rights and the commit's time."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            is_program = path.is_dir() or bool(path.stat().st_mode & 0o100)
            path.chmod(0o755 if is_program else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
