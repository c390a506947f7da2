"""Libraries for another system than the one that builds: uv evaluates what they need over there."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from making.cpython import TABLE, read_build
from making.files import delete_matching
from making.project import output
from making.tree import UV, pip, window_requirements

UNUSED = ("bin", "*.pth", "example.py", "**/tests", "pyqtgraph/examples", "shiboken6/include")
UNUSED_SUFFIXES = (".pyi", ".a", ".lib", ".pdb", ".h", ".typed", ".exe")
"""What is left out of libraries: programs, tests, examples, and what only compilers read."""


def packed_python_version(table: Path = TABLE) -> str:
    """Return the version of Python that packages hold, such as "3.11"."""
    major, minor, _ = read_build("windows-x86_64", table).version.split(".", 2)
    return f"{major}.{minor}"


def check_builder() -> None:
    """Check that this Python may write byte code for the packed one.

    Raises:
        SystemExit: it has another version.
    """
    wanted = packed_python_version()
    found = "{}.{}".format(*sys.version_info[:2])
    if found != wanted:
        raise SystemExit(f"Packages for other systems are built by Python {wanted}, not {found}.")


def install_window_libraries(target: Path, platform: str) -> None:
    """Install the window's libraries for a platform, without what Tandem does not use."""
    install_for(platform, target, *window_requirements())
    delete_matching(target, UNUSED)
    for path in sorted(target.rglob("*")):
        if path.suffix in UNUSED_SUFFIXES and path.is_file():
            path.unlink()


def install_uv_for(platform: str, folder: Path, name: str) -> None:
    """Put the uv of a platform into a folder, and its metadata beside the libraries.

    Args:
        name: the program's file, such as "uv.exe".
    """
    with tempfile.TemporaryDirectory() as work:
        install_for(platform, Path(work) / "uv", UV, "--no-deps")
        folder.mkdir(exist_ok=True)
        shutil.move(Path(work) / "uv" / "bin" / name, folder / name)
        for metadata in (Path(work) / "uv").glob("uv-*.dist-info"):
            shutil.move(metadata, folder.with_name("site") / metadata.name)


def install_for(platform: str, target: Path, *arguments: str) -> None:
    """Install wheels of a platform, as uv names it, into a folder."""
    with tempfile.TemporaryDirectory() as work:
        pip("install", "--target", f"{work}/uv", "--no-deps", UV)
        output(
            f"{work}/uv/bin/uv", "pip", "install", "--quiet", "--no-config",
            "--target", str(target), "--python-platform", platform,
            "--python-version", packed_python_version(), "--only-binary", ":all:", *arguments,
        )  # fmt: skip


def compile_for(folder: Path, *parts: str) -> None:
    """Write byte code that is valid as long as the package is."""
    for part in parts:
        output(
            sys.executable, "-I", "-B", "-m", "compileall", "-q", "--invalidation-mode",
            "unchecked-hash", "-s", f"{folder}{os.sep}", str(folder / part),
        )  # fmt: skip
