"""Tandem.app: the folder that every package holds, as macOS wants programs to lie.

    Contents/Info.plist        names, version, file type
    Contents/MacOS/Tandem      starts the Python below in its own process
    Contents/Resources/        bin, python, site, src as on Linux; the icon

It is for Apple's own processors.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import struct
from pathlib import Path
from typing import Any

from making.cross import check_builder, compile_for, install_uv_for, install_window_libraries
from making.icons import draw_icon
from making.macos.binaries import mach_files, missing_libraries, thin
from making.macos.qt import prune_qt
from making.project import ROOT, Project, output
from making.tree import (
    LAUNCHER,
    UNUSED_ANYWHERE,
    UNUSED_PYTHON,
    install_tandem,
    settle,
    tidy_install_records,
    write_licences,
)

PLATFORM = "aarch64-apple-darwin"
IDENTIFIER = "org.tandem-llm.Tandem"
FILE_TYPE = "org.tandem-llm.gguf"
COMPILER = "cc -arch arm64 -mmacosx-version-min=13.0"
ICON_PARTS = {
    b"icp4": 16, b"icp5": 32, b"ic07": 128, b"ic08": 256, b"ic09": 512, b"ic10": 1024,
    b"ic11": 32, b"ic12": 64, b"ic13": 256, b"ic14": 512,
}  # fmt: skip
"""Pictures of an .icns file and their sizes; from ic10 on for screens of double density."""

MACOS_TAG = re.compile(r"^Tag: .*macosx_(\d+)_(\d+)_(?:arm64|universal2)$", re.MULTILINE)
UNUSED_HERE = (*UNUSED_ANYWHERE, "config-3*", "*.a")
UNUSED_MODULES = ("_tkinter*", "_test*", "_ctypes_test*", "xxlimited*")


def make_bundle(app: Path, project: Project, python: Path) -> None:
    """Make Tandem.app, not signed yet.

    Args:
        python: prefix of a CPython for macOS, of python-build-standalone.

    Raises:
        SystemExit: it would not work on macOS, and why.
    """
    check_builder()
    resources = app / "Contents" / "Resources"
    copy_python(python, resources / "python")
    install_window_libraries(resources / "site", PLATFORM)
    prune_qt(resources / "site" / "PySide6")
    for path in mach_files(resources):
        thin(path)
    install_tandem(resources / "src")
    install_uv_for(PLATFORM, resources / "bin", "uv")
    for part in ("site", "src"):
        tidy_install_records(resources / part)
    write_text(resources / "bin" / "tandem", LAUNCHER, 0o755)
    packages = next((resources / "python" / "lib").glob("python3.*")) / "site-packages"
    packages.mkdir()
    write_text(packages / "tandem.pth", "../../../../src\n../../../../site\n")
    write_licences(resources, project)
    compile_for(resources, "python/lib", "site", "src")
    write_icns(ROOT / "resources" / "tandem.svg", resources / "tandem.icns")
    shutil.copyfile(ROOT / "LICENSE", resources / "LICENSE")
    compile_launcher(
        app / "Contents" / "MacOS" / "Tandem", next((resources / "python").glob("lib/*.dylib"))
    )
    check_bundle(app)
    with (app / "Contents" / "Info.plist").open("wb") as file:
        plistlib.dump(information(project, least_system(resources / "site")), file)
    settle(app, project.epoch)


def copy_python(source: Path, target: Path) -> None:
    """Copy a CPython for macOS without what Tandem never needs.

    Raises:
        SystemExit: there is none.
    """
    libraries = list((source / "lib").glob("libpython3.*.dylib"))
    if len(libraries) != 1:
        raise SystemExit(f"{source} holds no CPython for macOS, with lib/libpython3.*.dylib.")
    name = libraries[0].stem.removeprefix("lib")
    library = source / "lib" / name

    def is_unused(folder: str, names: list[str]) -> set[str]:
        unused = set(shutil.ignore_patterns(*UNUSED_HERE, *UNUSED_MODULES)(folder, names))
        return unused | (set(UNUSED_PYTHON) & set(names) if Path(folder) == library else set())

    shutil.copytree(library, target / "lib" / name, ignore=is_unused, symlinks=True)
    shutil.copy2(libraries[0], target / "lib" / libraries[0].name)
    (target / "bin").mkdir()
    shutil.copy2(source / "bin" / name, target / "bin" / name)
    (target / "bin" / "python3").symlink_to(name)
    shutil.copytree(source / "include" / name, target / "include" / name)


def compile_launcher(program: Path, library: Path) -> None:
    """Compile packaging/macos/launcher.c, with the compiler that CC names where one is given."""
    program.parent.mkdir(parents=True)
    output(
        *shlex.split(os.environ.get("CC") or COMPILER), "-O2", "-Wall", "-Wextra", "-Werror",
        f'-DPYTHON_LIBRARY="{library.name}"', "-o", str(program),
        str(ROOT / "packaging" / "macos" / "launcher.c"),
    )  # fmt: skip


def information(project: Project, least: str) -> dict[str, Any]:
    """Return what Info.plist says.

    Args:
        least: oldest macOS that it runs on.
    """
    return {
        "CFBundleDevelopmentRegion": "en",
        "CFBundleLocalizations": ["en", "de"],
        "CFBundleName": "Tandem",
        "CFBundleDisplayName": "Tandem",
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleExecutable": "Tandem",
        "CFBundleIconFile": "tandem.icns",
        "CFBundlePackageType": "APPL",
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleShortVersionString": project.version,
        "CFBundleVersion": project.version,
        "CFBundleDocumentTypes": [{
            "CFBundleTypeName": "GGUF language model", "CFBundleTypeRole": "Viewer",
            "LSHandlerRank": "Default", "LSItemContentTypes": [FILE_TYPE],
        }],
        "UTImportedTypeDeclarations": [{
            "UTTypeIdentifier": FILE_TYPE, "UTTypeDescription": "GGUF language model",
            "UTTypeConformsTo": ["public.data"],
            "UTTypeTagSpecification": {"public.filename-extension": ["gguf"]},
        }],
        "LSApplicationCategoryType": "public.app-category.productivity",
        "LSMinimumSystemVersion": least,
        "LSArchitecturePriority": ["arm64"],
        "NSHighResolutionCapable": True,
        "NSPrincipalClass": "NSApplication",
        "NSHumanReadableCopyright": "The Tandem authors, MIT license",
    }  # fmt: skip


def least_system(site: Path) -> str:
    """Return the oldest macOS, such as "13.0", that all libraries promise to run on."""
    least = (11, 0)  # the first one for Apple's own processors
    for wheel in site.glob("*.dist-info/WHEEL"):
        promised = [(int(a), int(b)) for a, b in MACOS_TAG.findall(wheel.read_text())]
        least = max(least, min(promised, default=least))
    return "{}.{}".format(*least)


def check_bundle(app: Path) -> None:
    """Check what would only fail on the computers of others.

    Raises:
        SystemExit: a file or a library is missing.
    """
    resources = app / "Contents" / "Resources"
    wanted = ("bin/uv", "bin/tandem", "python/bin/python3", "src/app/__main__.py", "tandem.icns")
    problems = [f"{name} is missing" for name in wanted if not (resources / name).exists()]
    problems += missing_libraries(app, mach_files(app))
    if problems:
        raise SystemExit("Tandem.app is not complete:\n" + "\n".join(problems))


def write_icns(source: Path, target: Path) -> None:
    """Write the icon in all sizes of macOS into one file."""
    parts = b""
    for kind, size in ICON_PARTS.items():
        picture = draw_icon(source, size)
        parts += kind + struct.pack(">I", 8 + len(picture)) + picture
    target.write_bytes(b"icns" + struct.pack(">I", 8 + len(parts)) + parts)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a text file with these rights."""
    path.write_text(text)
    path.chmod(mode)
