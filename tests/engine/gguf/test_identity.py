"""Telling models apart, and noticing that a file has changed."""

import os
from pathlib import Path

from engine.gguf import GGUFFile
from engine.gguf.identity import file_stamp, model_hash
from tests.helpers.tiny_gguf import split_gguf, tiny_gguf


def hash_of(path: Path) -> str:
    with GGUFFile.open(path) as file:
        return model_hash(file)


def test_a_model_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    a = tiny_gguf(tmp_path / "a.gguf")
    assert len(hash_of(a)) == 64
    assert hash_of(a) == hash_of(tiny_gguf(tmp_path / "b.gguf"))
    other_name = tiny_gguf(tmp_path / "c.gguf", extra={"general.name": "another"})
    assert hash_of(a) != hash_of(other_name)


def test_models_with_the_same_header_differ_by_their_weights(tmp_path: Path) -> None:
    """As two that were trained further from the same one."""
    a, b = (tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    size = 4096
    assert a.read_bytes()[:size] == b.read_bytes()[:size], "the headers are alike"
    assert hash_of(a) != hash_of(b)


def test_a_model_in_parts_has_one_name_whichever_is_opened(tmp_path: Path) -> None:
    parts = split_gguf(tiny_gguf(tmp_path / "m.gguf"), 3)
    assert hash_of(parts[0]) == hash_of(parts[2])


def test_a_change_on_the_disk_shows(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        before = file_stamp(file)
        assert file_stamp(file) == before
        os.utime(path, ns=(0, 12345))
        assert file_stamp(file) != before
        path.unlink()
        assert file_stamp(file) == ()
