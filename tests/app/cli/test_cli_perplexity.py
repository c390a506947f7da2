"""`perplexity` against the plain reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import load_tokenizer
from tests.helpers.command_line import TEMPLATE, Run, assert_refused
from tests.helpers.plain_llama import PlainLlama
from tests.helpers.tiny_gguf import tiny_gguf


def plain_losses(path: Path, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return -log p of each token but the first, from the plain reference."""
    logits = PlainLlama(path).logits(list(ids))[:-1]
    top = logits.max(-1)
    log_sum = np.log(np.exp(logits - top[:, None]).sum(-1)) + top
    return log_sum - logits[np.arange(len(logits)), list(ids)[1:]]


TEXT = "hello the world, a split model tensor.\nAnd more of it: 0123456789 " * 2


@pytest.mark.parametrize("options", [(), ("--devices", "cpu,cpu", "--split", "1,2")], ids=str)
def test_perplexity_scores_what_has_half_a_chunk_before_it(
    run: Run, model: Path, tmp_path: Path, options: Sequence[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    ids = load_tokenizer(model).encode(TEXT)
    ask = ("perplexity", model, file, "--ctx", 16, "--kv-type", "f32", *options)
    document = run(*ask, "--json").document
    chunks = [ids[start : start + 16] for start in range(0, len(ids) - 15, 16)]
    expected = np.concatenate([plain_losses(model, [1, *chunk[1:]])[8:] for chunk in chunks])
    assert document["n_chunks"] == len(chunks) > 2
    assert document["n_scored"] == len(expected)
    assert document["nll"] == pytest.approx(expected.mean(), rel=1e-5)
    assert document["perplexity"] == pytest.approx(np.exp(expected.mean()), rel=1e-4)
    human = run(*ask)
    assert human.out.startswith(f"perplexity {document['perplexity']:.4f} ± ")
    assert human.out.count("\n") == 1


def test_perplexity_of_a_short_text_scores_all_but_its_first_token(
    run: Run, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("hello the world", encoding="utf-8")
    expected = plain_losses(model, load_tokenizer(model).encode("hello the world"))
    outcome = run("perplexity", model, file, "--kv-type", "f32", "--json")
    assert outcome.document["nll"] == pytest.approx(expected.mean(), rel=1e-5)
    assert outcome.document["n_scored"] == len(expected)
    assert outcome.err == ""
    file.write_text("", encoding="utf-8")
    assert_refused(run("perplexity", model, file), "too short to be scored")


def test_perplexity_stays_within_what_the_model_was_trained_for(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """The usual 512 tokens are too many for a smaller model."""
    small = tiny_gguf(folder / "small.gguf", n_ctx=32, chat_template=TEMPLATE)
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    outcome = run("perplexity", small, file, "--json")
    assert outcome.document["n_chunks"] == len(load_tokenizer(small).encode(TEXT)) // 32
    assert outcome.err == ""
