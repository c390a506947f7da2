"""The list of components fits its schema, names what is inside, and has the same bytes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from making.licences import shipped_parts
from making.project import Project
from making.sbom import write_sbom

from tests.helpers.small_tree import small_tree

PROJECT = Project("9.8.7", 1_800_000_000)
LOCK = f"""
[[packages]]
name = "torch"
version = "2.15.0"
[[packages.wheels]]
url = "https://files.pythonhosted.org/packages/torch-2.15.0-cp311-none-any.whl"
hashes = {{ sha256 = "{"ab" * 32}" }}
"""


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / "pylock.cpu-linux-x86_64.toml").write_text(LOCK)
    (folder / "pylock.cuda13-linux-x86_64.toml").write_text(LOCK)
    (folder / "pylock.cpu-macos-aarch64.toml").write_text(LOCK.replace("torch", "other"))
    return folder


def made(path: Path, tree: Path, locks: Path) -> dict[str, Any]:
    write_sbom(path, shipped_parts(tree, PROJECT), PROJECT, "linux-x86_64", locks)
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_the_list_has_all_parts_and_what_is_inside_of_them(tmp_path: Path, locks: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    bom = made(tmp_path / "one.json", tree, locks)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["version"] == "9.8.7"
    by_name = {component["name"]: component for component in bom["components"]}
    assert set(by_name) == {
        "Python", "Qt", "Inter", "PySide6_Essentials", "fast", "tiny", "torch"
    }  # fmt: skip
    assert by_name["fast"]["purl"] == "pkg:pypi/fast@1.0"
    assert by_name["fast"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    (ring,) = by_name["fast"]["components"]
    assert ring["purl"] == "pkg:cargo/ring@0.17.1"
    assert by_name["torch"]["scope"] == "optional"
    assert by_name["torch"]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path, locks: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    for name in ("one.json", "two.json"):
        made(tmp_path / name, tree, locks)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
