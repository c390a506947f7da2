"""Perplexity: what it refuses, and how it cuts a text."""

from pathlib import Path

import numpy as np
import pytest

from engine import EngineError, PromptError, load_model, perplexity
from tests.helpers.plain_llama import PlainLlama
from tests.helpers.tiny_gguf import tiny_gguf

IDS = list(range(5, 45))


def test_only_the_second_half_of_a_chunk_is_scored(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.add_bos_token": False})
    with load_model(path, n_ctx=16, kv_type="f32") as model:
        result = perplexity(model, IDS)
    plain = PlainLlama(path)
    losses = []
    for start in (0, 16):
        logits = plain.logits(IDS[start : start + 16])
        for i in range(9, 16):
            row = logits[i - 1]
            losses.append(np.log(np.exp(row).sum()) - row[IDS[start + i]])
    assert result.n_chunks == 2
    assert result.n_scored == 14
    assert result.nll == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(("ids", "n_ctx"), [([5], 16), (IDS, 1)])
def test_less_than_two_tokens_cannot_be_scored(tmp_path: Path, ids: list[int], n_ctx: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with load_model(path, n_ctx=n_ctx) as model, pytest.raises(PromptError, match="too short"):
        perplexity(model, ids)


def test_predictions_that_are_no_numbers_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with load_model(path, n_ctx=16) as model:
        shape = (16, model.info.n_vocab)
        monkeypatch.setattr(model, "logits", lambda ids: np.full(shape, np.nan, np.float32))
        with pytest.raises(EngineError, match="no usable probabilities"):
            perplexity(model, IDS)
