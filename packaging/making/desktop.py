"""What a Linux desktop shows of Tandem: menu entry, icons, file type, metadata, man page."""

from __future__ import annotations

import gzip
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from making.icons import write_icons
from making.project import LINUX, ROOT, Project, output

APP_ID = "org.tandem_llm.Tandem"
"""Name of the menu entry, the icon and all that belongs to them; the window says that it has this
entry (`app/run.py`)."""


def install(usr: Path, tree: Path, project: Project) -> Path:
    """Lay out a tree as a system has programs: `lib`, `bin` and `share`; return where it is."""
    home = usr / "lib" / "tandem"
    home.parent.mkdir(parents=True)
    shutil.copytree(tree, home, symlinks=True)
    (usr / "bin").mkdir()
    (usr / "bin" / "tandem").symlink_to("../lib/tandem/bin/tandem")
    write_desktop_files(usr / "share", project)
    return home


def write_desktop_files(share: Path, project: Project) -> None:
    """Write menu entry, file type, metadata, icons and man page below a `share` folder."""
    day = f"{datetime.fromtimestamp(project.epoch, UTC):%Y-%m-%d}"
    texts = {"@VERSION@": project.version, "@DATE@": day}
    _copy(share / "applications" / f"{APP_ID}.desktop", texts)
    _copy(share / "mime" / "packages" / f"{APP_ID}.xml", texts)
    _copy(share / "metainfo" / f"{APP_ID}.metainfo.xml", texts)
    write_icons(ROOT / "resources" / "tandem.svg", share / "icons" / "hicolor", APP_ID)
    man = share / "man" / "man1"
    man.mkdir(parents=True)
    write_gzip(man / "tandem.1.gz", manual(project, day).encode())


def manual(project: Project, day: str) -> str:
    """Return the man page, whose options are those that `tandem --help` lists."""
    help_text = output(sys.executable, "-m", "app", "--help")
    lines = [line.replace("\\", "\\e").replace("-", "\\-") for line in help_text.splitlines()]
    listing = "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines)
    return (
        (LINUX / "tandem.1")
        .read_text()
        .replace("@VERSION@", project.version)
        .replace("@DATE@", day)
        .replace("@HELP@", listing)
    )


def _copy(target: Path, texts: dict[str, str]) -> None:
    """Copy a file of packaging/linux and fill in its marks."""
    text = (LINUX / target.name).read_text()
    for mark, value in texts.items():
        text = text.replace(mark, value)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def write_gzip(path: Path, data: bytes) -> None:
    """Write a compressed file without the time, so that its bytes are always the same."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(data)
