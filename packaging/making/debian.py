"""The Debian package: the tree in /usr/lib/tandem, and what desktops and shells look for."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from making.desktop import install, write_gzip
from making.files import hash_of
from making.libraries import elf_files
from making.licences import copyright_file, shipped_parts
from making.project import LINUX, ROOT, Project, output
from making.tree import settle

CONTROL = """Package: tandem
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {kib}
Depends: {depends}, ca-certificates, xdg-utils
Recommends: gcc, libc6-dev, desktop-file-utils, shared-mime-info, hicolor-icon-theme
Section: science
Priority: optional
Description: run one GGUF language model on all GPUs of a computer
 Tandem runs one model on all GPUs at once, of mixed kinds and sizes, or on the
 processor alone. Sliders set how much each device takes; a window shows memory
 and tokens per second of each of them while you chat.
 .
 The engine is fetched on the first start, for the hardware that is found.
"""
"""The C compiler is for Triton's own launcher of GPU kernels: without it Tandem's takes its place.
Menu, file types and icons are registered by triggers of the three packages behind it."""

MAINTAINER = "The Tandem authors <tandem@localhost.invalid>"

CHANGELOG = """tandem ({version}) unstable; urgency=medium

  * Tandem {version}; NEWS.gz says what is new in it.

 -- {maintainer}  {time}
"""

MISSING = re.compile(r"cannot find library (\S+) needed by")


def build_deb(tree: Path, out: Path, project: Project) -> Path:
    """Pack a tree; return the path of the package."""
    root = out / "deb-root"
    shutil.rmtree(root, ignore_errors=True)
    home = install(root / "usr", tree, project)
    write_documents(root / "usr" / "share", home, project)
    control = root / "DEBIAN"
    control.mkdir()
    sums = [f"{hash_of(path, 'md5')}  {path.relative_to(root)}\n" for path in _files(root / "usr")]
    (control / "md5sums").write_text("".join(sums))
    architecture = output("dpkg", "--print-architecture")
    text = CONTROL.format(
        version=project.version, architecture=architecture, depends=depends(home),
        maintainer=MAINTAINER, kib=sum(path.stat().st_size for path in _files(root)) // 1024,
    )  # fmt: skip
    (control / "control").write_text(text)
    settle(root, project.epoch)
    package = out / f"tandem_{project.version}_{architecture}.deb"
    environment = {"SOURCE_DATE_EPOCH": str(project.epoch), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(
        [
            "dpkg-deb", "--root-owner-group", "-Zxz", f"-z{project.effort}", "--build",
            str(root), str(package),
        ],
        env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.rmtree(root)
    return package


def write_documents(share: Path, home: Path, project: Project) -> None:
    """Write changelog, copyright and the reasons for what Debian's checks are told to accept."""
    folder = share / "doc" / "tandem"
    folder.mkdir(parents=True)
    time = f"{datetime.fromtimestamp(project.epoch, UTC):%a, %d %b %Y %H:%M:%S +0000}"
    changes = CHANGELOG.format(version=project.version, maintainer=MAINTAINER, time=time)
    write_gzip(folder / "changelog.gz", changes.encode())
    write_gzip(folder / "NEWS.gz", (ROOT / "CHANGELOG.md").read_bytes())
    parts = shipped_parts(home, project)
    (folder / "copyright").write_text(copyright_file(parts), encoding="utf-8")
    overrides = share / "lintian" / "overrides"
    overrides.mkdir(parents=True)
    shutil.copyfile(LINUX / "lintian-overrides", overrides / "tandem")


def _files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]


def depends(home: Path) -> str:
    """Return the packages whose libraries the files of a tree load, with their least versions.

    Raises:
        SystemExit: this machine lacks some of them, so that their packages cannot be known.
    """
    programs = elf_files(home)
    work = home.parents[2] / "shlibdeps"
    (work / "debian").mkdir(parents=True)
    (work / "debian" / "control").write_text(
        "Source: tandem\n\nPackage: tandem\nArchitecture: any\n"
    )
    done = subprocess.run(
        [
            "dpkg-shlibdeps", "-O", "-xlibpython3.11", "--ignore-missing-info",
            *[f"-l{folder}" for folder in sorted({path.parent for path in programs})],
            *[f"-e{path}" for path in programs],
        ],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    shutil.rmtree(work)
    if missing := sorted(set(MISSING.findall(done.stderr))):
        raise SystemExit(
            f"This machine lacks {', '.join(missing)}. Run: "
            "apt-get install $(cat packaging/linux/build-packages)"
        )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.strip().removeprefix("shlibs:Depends=")
