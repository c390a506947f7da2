"""The AppDir: a folder that starts by itself on any Linux desktop, wherever it lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from making.desktop import APP_ID, install
from making.libraries import elf_files, needed_libraries
from making.project import Project, output
from making.tree import settle

DESKTOP_LIBRARIES = {
    # the C library and the compiler's
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libm.so.6",
    "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1", "libgcc_s.so.1",
    "libstdc++.so.6",
    # drivers of the graphics card belong to these
    "libEGL.so.1", "libGL.so.1", "libdrm.so.2", "libwayland-client.so.0", "libwayland-cursor.so.0",
    "libwayland-egl.so.1", "libX11.so.6", "libX11-xcb.so.1", "libxcb.so.1", "libxcb-glx.so.0",
    "libxcb-randr.so.0", "libxcb-render.so.0", "libxcb-shape.so.0", "libxcb-shm.so.0",
    "libxcb-sync.so.1", "libxcb-xfixes.so.0", "libxcb-xkb.so.1",
    # these read settings that belong to the same version: keyboards, fonts, buses, accounts
    "libxkbcommon.so.0", "libxkbcommon-x11.so.0", "libfontconfig.so.1", "libfreetype.so.6",
    "libdbus-1.so.3", "libglib-2.0.so.0", "libgthread-2.0.so.0", "libgssapi_krb5.so.2", "libz.so.1",
}  # fmt: skip
"""Libraries that every desktop has, and has in a version that fits it."""

APP_RUN = """#!/bin/sh
# Starts Tandem from this folder.
exec "$(dirname "$(readlink -f "$0")")/usr/bin/tandem" "$@"
"""


def build_appdir(tree: Path, out: Path, project: Project) -> Path:
    """Lay out a tree as an AppDir; return its path."""
    folder = out / "Tandem.AppDir"
    shutil.rmtree(folder, ignore_errors=True)
    home = install(folder / "usr", tree, project)
    bundle_libraries(home)
    run = folder / "AppRun"
    run.write_text(APP_RUN)
    run.chmod(0o755)
    share = folder / "usr" / "share"
    (folder / f"{APP_ID}.desktop").symlink_to(f"usr/share/applications/{APP_ID}.desktop")
    icon = share / "icons" / "hicolor" / "256x256" / "apps" / f"{APP_ID}.png"
    shutil.copyfile(icon, folder / f"{APP_ID}.png")
    (folder / ".DirIcon").symlink_to(f"{APP_ID}.png")
    settle(folder, project.epoch)
    return folder


def bundle_libraries(home: Path) -> None:
    """Copy what a tree loads and other desktops may lack, and have its files find the copies.

    Raises:
        SystemExit: this machine lacks one of them itself.
    """
    files = elf_files(home)
    own = {path.name for path in files}
    folder = home / "lib"
    folder.mkdir()
    paths = _paths_of_libraries()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        foreign = set(needed_libraries(path)) - DESKTOP_LIBRARIES - own
        if foreign:
            _look_in(path, folder)
        for name in sorted(foreign):
            target = folder / name
            if target.exists():
                continue
            if name not in paths:
                raise SystemExit(f"This machine lacks {name}, which {path.name} loads.")
            shutil.copyfile(paths[name], target)
            _copy_licence(Path(paths[name]), folder / "licences")
            waiting.append(target)


def _look_in(path: Path, folder: Path) -> None:
    """Have a compiled file look for libraries in a folder, behind where it looks already."""
    known = output("patchelf", "--print-rpath", str(path))
    here = f"$ORIGIN/{os.path.relpath(folder, path.parent)}".removesuffix("/.")
    output("patchelf", "--set-rpath", f"{known}:{here}" if known else here, str(path))


def _copy_licence(library: Path, folder: Path) -> None:
    """Copy the licence of a library of this machine, which Debian's package has beside it."""
    package = output("dpkg", "-S", f"*/{library.resolve().name}").partition(":")[0]
    folder.mkdir(exist_ok=True)
    shutil.copyfile(f"/usr/share/doc/{package}/copyright", folder / f"{package}.txt")


def _paths_of_libraries() -> dict[str, str]:
    """Return where this machine has each shared library, by name."""
    lines = output("/sbin/ldconfig", "-p").splitlines()
    found = (line.strip().partition(" => ") for line in reversed(lines))
    return {name.split()[0]: path for name, _, path in found if path}
