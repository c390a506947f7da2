"""Models are told apart, and a file that has changed is noticed."""

import os
from pathlib import Path

from engine.formats.gguf.reader import GGUFFile, model_hash
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
    with GGUFFile.open(path) as file, GGUFFile.open(path) as again:
        assert file.stamps == again.stamps
        os.utime(path, ns=(0, 12345))
        with GGUFFile.open(path) as changed:
            assert changed.stamps != file.stamps


def test_another_file_under_the_same_name_is_not_taken_for_the_open_one(tmp_path: Path) -> None:
    """As where a download replaces a model while it is loaded."""
    path = tiny_gguf(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        before = file.stamps
        tiny_gguf(tmp_path / "new.gguf", n_layer=1).replace(path)
        assert file.stamps == before
    with GGUFFile.open(path) as replaced:
        assert replaced.stamps != before
