"""What a Linux desktop shows of Tandem: menu entry, icons, file type, metadata, man page."""

from __future__ import annotations

import gzip
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from making.icons import write_icons
from making.project import LINUX, ROOT, Project, output


def write_desktop_files(share: Path, project: Project) -> None:
    """Write all of it below a `share` folder."""
    day = f"{datetime.fromtimestamp(project.epoch, UTC):%Y-%m-%d}"
    texts = {"@VERSION@": project.version, "@DATE@": day}
    _copy("tandem.desktop", share / "applications", "tandem.desktop", texts)
    _copy("tandem-mime.xml", share / "mime" / "packages", "tandem.xml", texts)
    name = "org.tandem_llm.Tandem.metainfo.xml"
    _copy("tandem.metainfo.xml", share / "metainfo", name, texts)
    write_icons(ROOT / "resources" / "tandem.svg", share / "icons" / "hicolor")
    man = share / "man" / "man1"
    man.mkdir(parents=True)
    _write_gzip(man / "tandem.1.gz", manual(project, day).encode())


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


def _copy(source: str, folder: Path, name: str, texts: dict[str, str]) -> None:
    text = (LINUX / source).read_text()
    for mark, value in texts.items():
        text = text.replace(mark, value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def _write_gzip(path: Path, data: bytes) -> None:
    """Write a compressed file without the time, so that its bytes are always the same."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(data)


def write_documents(folder: Path, project: Project) -> None:
    """Write changelog and copyright as Debian wants them."""
    folder.mkdir(parents=True)
    _write_gzip(folder / "changelog.gz", (ROOT / "CHANGELOG.md").read_bytes())
    shutil.copyfile(ROOT / "LICENSE", folder / "copyright")
