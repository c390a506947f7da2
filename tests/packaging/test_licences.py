"""Every part of a package has a licence with its text, in the tree and in Debian's file."""

from __future__ import annotations

from pathlib import Path

import pytest
from making.licences import check_parts, copyright_file, licences_text, shipped_parts
from making.project import Project

from tests.helpers.small_tree import add_package, small_tree

PROJECT = Project("9.8.7", 1_800_000_000)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return small_tree(tmp_path)


def test_the_parts_of_a_tree_are_named_with_versions_and_licences(tree: Path) -> None:
    parts = shipped_parts(tree, PROJECT)
    check_parts(parts)
    assert [(part.name, part.version, part.licence) for part in parts] == [
        ("Tandem", "9.8.7", "MIT"),
        ("Python", "3.11.99", "PSF-2.0"),
        ("Qt", "1.0", "LGPL-3.0-only"),
        ("Inter", "3.19", "OFL-1.1"),
        ("fast", "1.0", "Apache-2.0"),
        ("PySide6_Essentials", "1.0", "LGPL-3.0-only"),
        ("tiny", "1.0", "MIT"),
    ]
    text = licences_text(parts)
    for words in ("MIT License", "PYTHON SOFTWARE", "GNU LESSER", "SIL OPEN FONT", "2020 Bob"):
        assert words in text


@pytest.mark.parametrize(
    ("licence", "files", "message"),
    [
        ("License-Expression: MIT", {}, "No text: bad"),
        ("Summary: none", {"LICENSE__txt": "words " * 50}, "No name of a licence: bad"),
        ("License: UNKNOWN", {"LICENSE__txt": "words " * 50}, "No name of a licence: bad"),
        ("License-Expression: MIT", {"LICENSE__txt": "MIT"}, "No text: bad"),
    ],
)
def test_a_package_without_a_licence_stops_the_build(
    tree: Path, licence: str, files: dict[str, str], message: str
) -> None:
    add_package(tree / "site", "bad", licence, **files)
    with pytest.raises(SystemExit, match=message):
        check_parts(shipped_parts(tree, PROJECT))


def test_a_python_without_its_licence_stops_the_build(tree: Path) -> None:
    (tree / "python" / "lib" / "python3.11" / "LICENSE.txt").unlink()
    with pytest.raises(SystemExit, match="No text: Python"):
        check_parts(shipped_parts(tree, PROJECT))


def test_debians_file_has_every_part_in_its_form(tree: Path) -> None:
    head, *sections = copyright_file(shipped_parts(tree, PROJECT)).split("\n\n")
    assert head.startswith("Format: https://www.debian.org/doc/packaging-manuals/copyright-format")
    assert len(sections) == 7
    for section in sections:
        names = [line.partition(":")[0] for line in section.splitlines() if line[0] != " "]
        assert names == ["Files", "Copyright", "License", "Comment"]
        assert all(line.strip() for line in section.splitlines())
    (fast,) = (section for section in sections if "Comment: fast" in section)
    assert "Files: usr/lib/tandem/site/fast-1.0.dist-info/*\n usr/lib/tandem/site/fast/*" in fast
    assert "Copyright: 2024-2026 Ada Example" in fast
    assert "/usr/share/common-licenses/Apache-2.0" in fast
    assert "The terms" not in fast
    (qt,) = (section for section in sections if "Comment: Qt" in section)
    assert "Copyright: The Qt Company" in qt
    assert "/usr/share/common-licenses/LGPL-3." in qt
    assert "/usr/share/common-licenses/GPL-3." in qt
    assert "How to Apply These Terms" in qt or "END OF TERMS" not in qt
