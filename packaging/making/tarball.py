"""The archive for any Linux: the AppDir with a script that installs it for one person."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from making.appdir import build_appdir
from making.libraries import elf_files, least_glibc
from making.project import LINUX, ROOT, Project
from making.tree import settle


@cache
def build_tarball(tree: Path, out: Path, project: Project) -> Path:
    """Pack a tree, once where several targets need it; return the path of the archive."""
    name = f"tandem-{project.version}-linux-{platform.machine()}"
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    appdir = build_appdir(tree, out, project).rename(folder / "Tandem.AppDir")
    glibc = least_glibc(elf_files(appdir))
    script = (LINUX / "install.sh").read_text()
    (folder / "install.sh").write_text(script.replace("@GLIBC@", glibc))
    (folder / "install.sh").chmod(0o755)
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    settle(folder, project.epoch)
    archive = out / f"{name}.tar.xz"
    subprocess.run(
        [
            "tar", "--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner",
            "--format=pax", "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",
            f"--use-compress-program=xz -{project.effort} --threads=2", f"--file={archive}", name,
        ],
        cwd=out, check=True,
    )  # fmt: skip
    shutil.rmtree(folder)
    return archive
