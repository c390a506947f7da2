"""Names from the network become paths inside the folder of models, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.models.downloads.transfer.source import RemoteFile, destination, file_names, safe_name
from engine import EngineError

BAD = [
    "", ".", "..", "../x.gguf", "a/b.gguf", "a\\b.gguf", "/etc/x.gguf", "C:x.gguf", "x\0.gguf",
    "x\n.gguf", " x.gguf", "x.gguf.", ".x.gguf", "con.gguf", "COM1.gguf", "nul", "a*b.gguf",
    "fugg.\u202eexe.gguf", "\ud800.gguf", "a" * 300 + ".gguf", "x:stream.gguf", "~\x7f.gguf",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"not a valid file name|not a \.gguf file"):
        destination(tmp_path, "acme", "tiny", name)
    for parts in ((name, "tiny"), ("acme", name)):
        if name not in ("x.gguf",):
            with pytest.raises(EngineError):
                destination(tmp_path, *parts, "x.gguf")


def test_a_usual_name_has_its_place(tmp_path: Path) -> None:
    found = destination(tmp_path, "acme", "Tiny-1.5B-GGUF", "tiny 1.5b (x) é.Q4_K_M.gguf")
    assert found == tmp_path / "acme" / "Tiny-1.5B-GGUF" / "tiny 1.5b (x) é.Q4_K_M.gguf"
    assert safe_name("e\u0301.gguf") == "\xe9.gguf"  # one form, whatever the server writes
    with pytest.raises(EngineError, match=r"not a \.gguf file"):
        destination(tmp_path, "acme", "tiny", "setup.exe")


def test_files_of_one_name_keep_their_folders_apart() -> None:
    assert file_names(["Q4/m.gguf", "Q8/m.gguf", "x/mmproj.gguf"]) == {
        "Q4/m.gguf": "Q4-m.gguf", "Q8/m.gguf": "Q8-m.gguf", "x/mmproj.gguf": "mmproj.gguf",
    }  # fmt: skip


def test_names_that_differ_by_case_alone_are_kept_apart() -> None:
    paths = ["X.gguf", "x.gguf", "a/m.gguf", "A/M.gguf", "x-2.gguf"]
    names = file_names(paths)
    assert names["X.gguf"] == "X.gguf"
    assert len({name.casefold() for name in names.values()}) == len(paths)
    assert all(name.endswith(".gguf") for name in names.values())


def test_files_are_the_same_by_their_hash_else_by_all_that_is_known() -> None:
    one = RemoteFile("https://a/x", "x.gguf", 5, "ab", "acme/tiny", "1")
    assert one.is_same(RemoteFile("https://b/y", "y.gguf", 5, "ab", "other/tiny", "2"))
    assert not one.is_same(RemoteFile("https://a/x", "x.gguf", 6, "ab", "acme/tiny", "1"))
    plain = RemoteFile("https://a/x", "x.gguf", 5, "", "a", "etag1")
    assert plain.is_same(RemoteFile("https://a/x?key=2", "x.gguf", 5, "", "a", "etag1"))
    assert not plain.is_same(RemoteFile("https://a/x", "x.gguf", 5, "", "a", "etag2"))
