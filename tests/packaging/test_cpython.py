"""The CPython of packages is fetched from a table of addresses and hashes, and nothing else."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tomllib
from pathlib import Path

import pytest
from making.cpython import TABLE, fetch_python, read_build, renew

RELEASE = "20300101"
TARGETS = tomllib.loads(TABLE.read_text(encoding="utf-8"))["targets"]


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        member = tarfile.TarInfo("python/LICENSE.txt")
        member.size = 3
        packed.addfile(member, io.BytesIO(b"PSF"))
    return buffer.getvalue()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table whose release is a folder on this machine, with hashes of it."""
    folder = tmp_path / "site" / RELEASE
    folder.mkdir(parents=True)
    sums = []
    for target in TARGETS.values():
        name = f"cpython-3.11.99+{RELEASE}-{target}-install_only_stripped.tar.gz"
        (folder / name).write_bytes(archive())
        sums.append(f"{hashlib.sha256(archive()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))
    path = tmp_path / "python.toml"
    known = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    address = folder.parent.as_uri()
    path.write_text(TABLE.read_text(encoding="utf-8").replace(known["address"], address))
    renew(RELEASE, "3.11.99", path)
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_every_platform_has_a_hash(name: str) -> None:
    build = read_build(name)
    assert build.url.startswith("https://")
    assert len(build.sha256) == 64


def test_a_renewed_table_leads_to_the_checked_archive(table: Path, tmp_path: Path) -> None:
    prefix = fetch_python("macos-aarch64", tmp_path / "out", table)
    assert (prefix / "LICENSE.txt").read_text() == "PSF"
    assert read_build("macos-aarch64", table).version == "3.11.99"


def test_another_archive_than_the_table_names_is_refused(table: Path, tmp_path: Path) -> None:
    (file,) = (tmp_path / "site").rglob("*windows*")
    file.write_bytes(archive() + b"more")
    with pytest.raises(SystemExit, match="has the SHA-256"):
        fetch_python("windows-x86_64", tmp_path / "out", table)
    assert not list((tmp_path / "out").iterdir())


def test_a_platform_without_a_hash_is_named(table: Path) -> None:
    text = table.read_text()
    table.write_text(text.partition("[sha256]")[0] + "[sha256]\n")
    with pytest.raises(SystemExit, match="no CPython with a SHA-256 for linux-x86_64"):
        read_build("linux-x86_64", table)
    with pytest.raises(SystemExit, match="solaris"):
        read_build("solaris-sparc")
