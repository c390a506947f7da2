"""Tandem.exe and bin/tandem.exe, compiled by mingw-w64 from packaging/windows/launcher.c."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from making.icons import draw_icon
from making.project import ROOT, Project, output

SOURCES = ROOT / "packaging" / "windows"
ICON_SIZES = (16, 20, 24, 32, 40, 48, 64, 128, 256)
FLAGS = ("-O2", "-s", "-municode", "-Wall", "-Wextra", "-Werror", "-D_WIN32_WINNT=0x0A00")


def write_launchers(folder: Path, project: Project) -> None:
    """Write Tandem.exe and bin/tandem.exe into the tree, whose Python they load."""
    library = next((folder / "python").glob("python3[0-9]*.dll")).name
    with tempfile.TemporaryDirectory() as work:
        resources = write_resources(Path(work), project)
        for name, flag in (("Tandem.exe", "-mwindows"), ("bin/tandem.exe", "-DCONSOLE")):
            output(
                "x86_64-w64-mingw32-gcc", *FLAGS, flag, f'-DPYTHON_LIBRARY=L"{library}"',
                "-Wl,--no-insert-timestamp", "-o", str(folder / name), str(SOURCES / "launcher.c"),
                str(resources), "-lshell32",
            )  # fmt: skip


def write_resources(work: Path, project: Project) -> Path:
    """Compile icon, version and manifest of the launchers; return the file."""
    write_ico(ROOT / "resources" / "tandem.svg", work / "tandem.ico")
    numbers = ",".join(version_numbers(project.version))
    compiled = work / "launcher.o"
    output(
        "x86_64-w64-mingw32-windres",
        f'-DICON_FILE=\\"{work / "tandem.ico"}\\"',
        f'-DMANIFEST_FILE=\\"{SOURCES / "launcher.manifest"}\\"',
        f"-DVERSION_NUMBERS={numbers}", f'-DVERSION_TEXT=\\"{project.version}\\"',
        str(SOURCES / "launcher.rc"), str(compiled),
    )  # fmt: skip
    return compiled


def version_numbers(version: str) -> list[str]:
    """Return the four numbers that Windows compares, such as 1.2.0.0 for "1.2.0rc1"."""
    numbers = []
    for part in version.split(".")[:4]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(digits or "0")
    return numbers + ["0"] * (4 - len(numbers))


def write_ico(source: Path, target: Path) -> None:
    """Write the icon in all sizes of Windows into one file, as PNGs."""
    pictures = [draw_icon(source, size) for size in ICON_SIZES]
    start = 6 + 16 * len(pictures)
    entries = b""
    for size, picture in zip(ICON_SIZES, pictures, strict=True):
        side = size % 256  # 256 is written as 0
        entries += struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(picture), start)
        start += len(picture)
    target.write_bytes(struct.pack("<HHH", 0, 1, len(pictures)) + entries + b"".join(pictures))
