"""The Debian package: the tree in /usr/lib/tandem, and what desktops and shells look for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from making.desktop import write_desktop_files, write_documents
from making.project import Project, output
from making.tree import settle

CONTROL = """Package: tandem
Version: {version}
Architecture: {architecture}
Maintainer: The Tandem authors <tandem@localhost.invalid>
Installed-Size: {kib}
Depends: {depends}, libxcb-cursor0, ca-certificates, xdg-utils
Recommends: gcc, desktop-file-utils, shared-mime-info, hicolor-icon-theme
Section: science
Priority: optional
Description: run one GGUF language model on all GPUs of a computer
 Tandem runs one model on all GPUs at once, of mixed kinds and sizes, or on the
 processor alone. Sliders set how much each device takes; a window shows memory
 and tokens per second of each of them while you chat.
 .
 The engine is fetched on the first start, for the hardware that is found.
"""


def build_deb(tree: Path, out: Path, project: Project) -> Path:
    """Pack a tree; return the path of the package."""
    root = out / "deb-root"
    shutil.rmtree(root, ignore_errors=True)
    home = root / "usr" / "lib" / "tandem"
    home.parent.mkdir(parents=True)
    shutil.copytree(tree, home, symlinks=True)
    (root / "usr" / "bin").mkdir()
    (root / "usr" / "bin" / "tandem").symlink_to("../lib/tandem/bin/tandem")
    write_desktop_files(root / "usr" / "share", project)
    write_documents(root / "usr" / "share" / "doc" / "tandem", project)
    control = root / "DEBIAN"
    control.mkdir()
    kib = sum(p.lstat().st_size for p in root.rglob("*") if p.is_file()) // 1024
    architecture = output("dpkg", "--print-architecture")
    (control / "control").write_text(
        CONTROL.format(
            version=project.version, architecture=architecture, kib=kib, depends=depends(home)
        )
    )
    settle(root, project.epoch)
    package = out / f"tandem_{project.version}_{architecture}.deb"
    environment = {"SOURCE_DATE_EPOCH": str(project.epoch), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zxz", "-z6", "--build", str(root), str(package)],
        env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return package


def depends(home: Path) -> str:
    """Return the packages whose libraries the files of a tree load, with their least versions."""
    programs = [
        str(path)
        for path in sorted(home.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    ]
    work = home.parents[2] / "shlibdeps"
    (work / "debian").mkdir(parents=True)
    (work / "debian" / "control").write_text(
        "Source: tandem\n\nPackage: tandem\nArchitecture: any\n"
    )
    folders = sorted({str(Path(path).parent) for path in programs})
    options = [f"-l{folder}" for folder in folders]
    done = subprocess.run(
        [
            "dpkg-shlibdeps", "-O", "-xlibpython3.11", "--ignore-missing-info", *options,
            *[f"-e{p}" for p in programs],
        ],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    shutil.rmtree(work)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.strip().removeprefix("shlibs:Depends=")
