"""What goes with the packages of a release: hashes, news, and the proof of equal bytes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from making import release
from making.project import ROOT, Project
from making.release import buildable, changes, compare, describe, write_news, write_sums

from tests.helpers.small_tree import small_tree

CHANGELOG = """# Changelog

## Unreleased

### Added
- Something to come

## [0.2.0] - 2026-12-01

### Added
- *Look for a new release*, see [the manual](https://example.org/manual), with `tandem`
  and a second line.

### Fixed
- A fault

## 0.1.0

- The first
"""


def test_news_are_a_section_of_the_changelog_as_plain_text() -> None:
    assert changes(CHANGELOG, "0.2.0") == (
        "Added\n- Look for a new release, see the manual, with tandem and a second line.\n\n"
        "Fixed\n- A fault"
    )
    assert changes(CHANGELOG, "0.1.0") == "- The first"
    assert changes(CHANGELOG, "0.3.0") == "Added\n- Something to come"
    assert len(changes("## 1.0\n" + "- line\n" * 5000, "1.0")) <= 8000


def test_an_installed_tandem_understands_the_news(tmp_path: Path) -> None:
    page = "https://example.org/tandem"
    told = json.loads(write_news(tmp_path / "release.json", "0.2.0", page).read_bytes())
    assert (told["version"], told["page"]) == ("0.2.0", page)
    assert 0 < len(told["news"]) <= 8000
    with pytest.raises(SystemExit, match="no page"):
        write_news(tmp_path / "other.json", "0.2.0", "http://example.org")
    assert not (tmp_path / "other.json").exists()


def test_hashes_are_checked_by_the_usual_program(tmp_path: Path) -> None:
    files = [tmp_path / "b.deb", tmp_path / "a.tar.xz"]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 100)
    write_sums(tmp_path / "SHA256SUMS", files)
    text = (tmp_path / "SHA256SUMS").read_text()
    assert [line.split()[1] for line in text.splitlines()] == ["a.tar.xz", "b.deb"]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_builds_with_other_bytes_are_named(tmp_path: Path) -> None:
    for name, data in (("one", b"1"), ("two", b"1"), ("three", b"3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tandem.deb").write_bytes(data)
    one, two, three = (tmp_path / name / "tandem.deb" for name in ("one", "two", "three"))
    compare([one], [two])
    with pytest.raises(SystemExit, match=r"differ: tandem\.deb"):
        compare([one], [three])


def test_a_system_without_the_programs_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "PROGRAMS", {"linux": {"deb": ("no-such-program",), "b": ()}})
    assert buildable("linux") == ["b"]
    monkeypatch.setattr(release, "PROGRAMS", {"linux": {"deb": ("no-such-program",)}})
    with pytest.raises(SystemExit, match="no-such-program"):
        buildable("linux")
    with pytest.raises(SystemExit, match="without beos"):
        buildable("beos")


def test_components_and_licences_go_with_the_packages(tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    files = describe(tree, tmp_path, Project("9.8.7", 1_800_000_000), "linux-x86_64")
    assert [file.name for file in files] == [
        "tandem-9.8.7-linux-x86_64.cdx.json", "tandem-9.8.7-linux-x86_64-licences.txt"
    ]  # fmt: skip
    assert "GNU LESSER GENERAL PUBLIC LICENSE" in files[1].read_text(encoding="utf-8")


def test_what_builds_has_the_versions_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = (ROOT / "packaging" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert len(wanted) == 4
    assert [line for line in wanted if f'"{line}"' not in project] == []


def test_every_folder_of_a_workflow_exists() -> None:
    """The workflow is run by a service alone, so at least its paths are checked here."""
    text = (ROOT / ".ci" / "release.yml").read_text(encoding="utf-8")
    paths = set(re.findall(r"packaging/[\w.]+\w", text))
    assert {"packaging/release.sh", "packaging/requirements.txt"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
