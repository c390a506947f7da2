"""Llama 4 beyond one chunk and one step of the temperature, which real files set at 8192 tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import load_model
from engine.model.layers.mixers.attention import Temperature
from tests.helpers.golden import TOLERANCE, nmse
from tests.helpers.hf_models.nope import LLAMA4, llama4_config

CHUNK, STEP = 16, 8

Built = tuple[Path, list[int], Any]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    family = replace(
        LLAMA4,
        config=lambda: llama4_config(attention_chunk_size=CHUNK, floor_scale=STEP, attn_scale=0.5),
    )
    path = tmp_path / "m.gguf"
    return path, *family.build(path)


@pytest.mark.parametrize("n_batch", [40, 11, 1])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_chunks_and_temperature(
    built: Built, n_batch: int, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.architectures.llama.CHUNK", CHUNK)
    monkeypatch.setattr(
        "engine.model.architectures.llama.TEMPERATURE", Temperature(0.5, STEP, offset=1)
    )
    path, ids, expected = built
    with load_model(path, ["cpu"] * n_ranks, kv_type="f32", n_batch=n_batch) as model:
        assert nmse(model.logits(ids), expected) <= TOLERANCE


def test_both_matter_here(built: Built) -> None:
    path, ids, expected = built
    with load_model(path, ["cpu"], kv_type="f32") as model:
        logits = model.logits(ids)
    assert nmse(logits[: STEP - 1], expected[: STEP - 1]) <= TOLERANCE
    assert nmse(logits[STEP - 1 : CHUNK], expected[STEP - 1 : CHUNK]) > TOLERANCE
    assert nmse(logits[CHUNK:], expected[CHUNK:]) > TOLERANCE
