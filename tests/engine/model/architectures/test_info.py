"""Descriptions of files, however odd their metadata."""

from pathlib import Path
from typing import Any

import pytest

from engine import inspect_model
from tests.helpers.model_draft import ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf

NAN = float("nan")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> ModelDraft:
    return ModelDraft.read(tiny_gguf(tmp_path_factory.mktemp("info") / "sound.gguf"))


ODD_ENTRIES = [
    ("general.name", 5),
    ("general.name", ["a"]),
    ("general.name", ""),
    ("general.name", "line\nbreak \x1b[31mred"),
    ("general.architecture", 5),
    ("general.architecture", "no\nname"),
    ("general.architecture", None),
    ("general.file_type", "Q4"),
    ("general.file_type", [2]),
    ("llama.attention.head_count", "many"),
    ("llama.attention.head_count", [0.5, 2.5]),
    ("llama.block_count", ["two"]),
    ("llama.context_length", NAN),
    ("llama.embedding_length", []),
    ("tokenizer.ggml.tokens", 7),
]


@pytest.mark.parametrize(("key", "value"), ODD_ENTRIES, ids=str)
def test_odd_metadata_can_be_looked_at(
    sound: ModelDraft, tmp_path: Path, key: str, value: Any
) -> None:
    path = sound.changed({key: value}).write(tmp_path / "odd.gguf")
    info = inspect_model(path).info
    assert info.n_params > 0
    assert info.name.isprintable()
    assert info.architecture in ("llama", "unknown")
    assert info.supported == (info.architecture == "llama")


def test_a_count_per_layer_is_told_by_its_largest(sound: ModelDraft, tmp_path: Path) -> None:
    heads = {"llama.attention.head_count": [4, 8], "llama.attention.head_count_kv": None}
    info = inspect_model(sound.changed(heads).write(tmp_path / "m.gguf")).info
    assert (info.n_head, info.n_head_kv) == (8, 8)


def test_of_a_list_longer_than_any_model_only_the_start_is_read(
    sound: ModelDraft, tmp_path: Path
) -> None:
    """A file can have 16 million elements of one byte each, as a header of 16 MB."""
    heads = {"llama.attention.head_count": [4] * 4096 + [8], "general.name": "x" * 10**6}
    found = inspect_model(sound.changed(heads).write(tmp_path / "m.gguf"))
    assert found.info.n_head == 4
    assert len(found.info.name) == 200
    assert "has 4097 entries, more than any model" in found.problem


def test_a_model_without_a_name_has_its_file_s(sound: ModelDraft, tmp_path: Path) -> None:
    for name in (None, "", " \n", 7):
        path = sound.changed({"general.name": name}).write(tmp_path / "my model.gguf")
        assert inspect_model(path).info.name == "my model"


def test_recommended_sampling_is_told_as_far_as_it_makes_sense(
    sound: ModelDraft, tmp_path: Path
) -> None:
    keys = {
        "temp": 0.6, "top_k": 20, "top_p": 1.5, "min_p": "much", "penalty_repeat": [1.0],
        "penalty_last_n": -1, "xtc_probability": NAN, "xtc_threshold": True,
    }  # fmt: skip
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    info = inspect_model(sound.changed(metadata).write(tmp_path / "m.gguf")).info
    assert dict(info.sampling) == {"temperature": 0.6, "top_k": 20, "repeat_last_n": -1}
    assert not inspect_model(sound.write(tmp_path / "plain.gguf")).info.sampling
