"""The folder that setup.exe installs.

    Tandem.exe   the window, without a console
    bin/         tandem.exe for terminals, uv.exe
    python/      a private CPython, and the runtime of Visual C++
    site/        libraries of the window, without torch
    src/         app, engine, resources, with their metadata
    LICENCES.txt the licences of all of these

As on Linux, everything finds the rest by its own place.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from making.cross import check_builder, compile_for, install_uv_for, install_window_libraries
from making.project import ROOT, Project
from making.tree import (
    UNUSED_ANYWHERE,
    UNUSED_PYTHON,
    install_tandem,
    settle,
    tidy_install_records,
    write_licences,
)
from making.windows.binaries import missing_libraries
from making.windows.launchers import write_launchers
from making.windows.pywin32 import FOLDERS, prune_pywin32
from making.windows.qt import prune_qt

PLATFORM = "x86_64-pc-windows-msvc"
PROGRAMS = ("python.exe", "python3.dll", "python3??.dll", "LICENSE.txt", "LICENSE")
UNUSED_LIBRARIES = (
    "_test*",
    "_tkinter*",
    "tcl*",
    "tk*",
    "_ctypes_test*",
    "xxlimited*",
    "*.pdb",
    "*.ico",
)

RUNTIME = (
    "vcruntime140.dll", "vcruntime140_1.dll", "msvcp140.dll", "msvcp140_1.dll", "msvcp140_2.dll",
    "msvcp140_codecvt_ids.dll", "concrt140.dll", "vcomp140.dll",
)  # fmt: skip
"""The runtime of Visual C++, which Python, Qt and torch load; the newest that a wheel brings."""

MAX_PATH = 180
"""Most characters of a path below the program's folder: with a usual folder of a person, Windows'
limit of 260 is kept, which only an administrator can lift."""


def make_windows_tree(folder: Path, project: Project, python: Path) -> None:
    """Fill an empty folder.

    Args:
        python: the folder of a CPython for Windows, with python.exe, DLLs and Lib.

    Raises:
        SystemExit: it would not work on Windows, and why.
    """
    check_builder()
    copy_python(python, folder / "python")
    install_window_libraries(folder / "site", PLATFORM)
    prune_qt(folder / "site" / "PySide6")
    prune_pywin32(folder / "site")
    place_runtime(folder)
    install_tandem(folder / "src")
    install_uv_for(PLATFORM, folder / "bin", "uv.exe")
    for part in ("site", "src"):
        tidy_install_records(folder / part)
    write_launchers(folder, project)
    packages = folder / "python" / "Lib" / "site-packages"
    packages.mkdir()
    (packages / "tandem.pth").write_text(path_lines())
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE.txt")
    write_licences(folder, project)
    compile_for(folder, "python/Lib", "site", "src")
    check_tree(folder)
    settle(folder, project.epoch)


def path_lines() -> str:
    """Return the lines of the file that tells Python where Tandem and its libraries are."""
    folders = ("src", "site", *(f"site/{name}" for name in FOLDERS))
    return "".join(f"../../../{folder}\n" for folder in folders)


def copy_python(source: Path, target: Path) -> None:
    """Copy a CPython for Windows without what Tandem never needs.

    Raises:
        SystemExit: there is none.
    """
    if not (source / "python.exe").is_file() or not (source / "Lib" / "os.py").is_file():
        raise SystemExit(f"{source} holds no CPython for Windows, with python.exe and Lib.")
    target.mkdir(parents=True)
    for pattern in PROGRAMS:
        for path in source.glob(pattern):
            shutil.copy2(path, target / path.name)
    for path in source.glob("vcruntime140*.dll"):
        shutil.copy2(path, target / path.name)
    shutil.copytree(
        source / "DLLs", target / "DLLs", ignore=shutil.ignore_patterns(*UNUSED_LIBRARIES)
    )
    library = source / "Lib"

    def is_unused(folder: str, names: list[str]) -> set[str]:
        unused = {name for name in names if name in UNUSED_ANYWHERE}
        return unused | (set(UNUSED_PYTHON) & set(names) if Path(folder) == library else set())

    shutil.copytree(library, target / "Lib", ignore=is_unused)
    for name in ("include", "libs"):  # Triton compiles its launchers with them
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def place_runtime(folder: Path) -> None:
    """Keep one runtime of Visual C++, beside python.exe, where every process finds it."""
    source = folder / "site" / "shiboken6"
    for name in RUNTIME:
        shutil.copy2(source / name, folder / "python" / name)
    for package in (source, folder / "site" / "PySide6"):
        for path in package.glob("*140*.dll"):
            path.unlink()


def check_tree(folder: Path) -> None:
    """Check what would only fail on the computers of others.

    Raises:
        SystemExit: a library or a program is missing, or a path is too long.
    """
    wanted = (
        "Tandem.exe",
        "bin/tandem.exe",
        "bin/uv.exe",
        "python/python.exe",
        "src/app/__main__.py",
    )
    problems = [f"{name} is missing" for name in wanted if not (folder / name).is_file()]
    problems += missing_libraries(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if len(name) > MAX_PATH:
            problems.append(f"{name} has a path of {len(name)} characters")
    if problems:
        raise SystemExit("The folder for Windows is not complete:\n" + "\n".join(problems))
