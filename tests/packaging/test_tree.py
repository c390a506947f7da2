"""The tree of a package has plain rights and times, and records that name what is there."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import which

import pytest
from making.desktop import write_gzip
from making.libraries import elf_files, least_glibc, needed_libraries
from making.tree import settle, tidy_install_records

EPOCH = 1_800_000_000


def test_programs_can_be_started_and_libraries_and_modules_cannot(tmp_path: Path) -> None:
    names = ("bin/tandem", "lib/libx.so.1", "lib/base64.py", "README")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        path.chmod(0o777 if name != "README" else 0o600)
    (tmp_path / "link").symlink_to("README")
    settle(tmp_path, EPOCH)
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in names] == [
        "0o755", "0o644", "0o644", "0o644",
    ]  # fmt: skip
    assert {path.lstat().st_mtime for path in tmp_path.rglob("*")} == {EPOCH}


def test_records_name_the_files_that_are_left_and_nothing_of_the_machine(tmp_path: Path) -> None:
    record = tmp_path / "thing-1.dist-info" / "RECORD"
    record.parent.mkdir()
    for name in ("INSTALLER", "REQUESTED", "direct_url.json", "METADATA"):
        (record.parent / name).touch()
    (tmp_path / 'a "b", c.py').touch()
    own = "thing-1.dist-info"
    lines = [
        f"{own}/RECORD,,", '"a ""b"", c.py",sha256=x,1', "gone.py,sha256=y,2", f"{own}/INSTALLER,,",
    ]  # fmt: skip
    record.write_text("\n".join(lines))
    tidy_install_records(tmp_path)
    assert record.read_text() == f'"a ""b"", c.py",sha256=x,1\n{own}/RECORD,,\n'
    assert sorted(path.name for path in record.parent.iterdir()) == ["METADATA", "RECORD"]


def test_what_is_compressed_bears_no_time(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        write_gzip(tmp_path / name, b"text")
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


@pytest.mark.skipif(sys.platform != "linux" or not which("readelf"), reason="needs readelf")
def test_compiled_files_tell_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "ls").write_bytes(Path("/bin/ls").read_bytes())
    (tmp_path / "text").write_text("no program")
    (tmp_path / "link").symlink_to("ls")
    assert elf_files(tmp_path) == [tmp_path / "ls"]
    assert "libc.so.6" in needed_libraries(tmp_path / "ls")
    major, minor = least_glibc([tmp_path / "ls"]).split(".")
    assert (int(major), int(minor)) >= (2, 2)
