"""Small trained models against a float64 forward pass of their original checkpoints."""

import json
from typing import Any

import numpy as np
import pytest

from engine import Finished, SamplingParams, TokenText, load_model
from tests.helpers.answers import ids_of
from tests.helpers.golden import golden_path
from tests.helpers.plain_llama import PlainLlama
from tests.helpers.tiers import paired

SPLITS = [[1], [1, 1], [3, 1], [1, 1, 1], [5, 0, 1]]

EXACT = {  # file -> (model, tolerance of logits, relative tolerance of the likelihood)
    # F32 weights: what remains is F32 arithmetic against F64
    "stories260K-F32": ("stories260K", 1e-4, 1e-6),
    # weights rounded to F16, of checkpoints that are not F16: 2^-11 relative per weight
    "bitllama-3M-F16": ("bitllama-3M", 3e-2, 5e-4),
}
LOSS = {  # file -> (model, relative loss of perplexity that llama.cpp shows for the type)
    "stories260K-Q8_0": ("stories260K", 0.0016),
    "stories260K-pad192-Q4_0": ("stories260K", 0.128),
    "stories260K-pad192-Q5_1": ("stories260K", 0.016),
    "bitllama-3M-Q4_K_M": ("bitllama-3M", 0.0007),
    "bitllama-3M-Q6_K": ("bitllama-3M", 0.0016),
    "bitllama-3M-IQ4_XS": ("bitllama-3M", 0.0060),
    "bitllama-3M-Q2_K": ("bitllama-3M", 0.048),
    "bitllama-3M-TQ2_0": ("bitllama-3M", 0.0002),
    "babyllama-tok105-Q8_0": ("babyllama-tok105", 0.002),
}
SLACK = 0.01
"""Those figures come from another text; on 256 tokens the loss of a type varies by this much."""


def golden(model: str) -> dict[str, Any]:
    text = golden_path("trained", "goldens.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["models"][model]
    return found


def load(file: str, split: list[int]) -> Any:
    path = golden_path("trained", f"{file}.gguf")
    return load_model(path, ["cpu"] * len(split), split, kv_type="f32")


def nll(model: Any, ids: list[int]) -> float:
    """Return the mean -log p of each token after the first."""
    logits = model.logits(ids)[:-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return float((log_sum - logits[np.arange(len(logits)), ids[1:]]).mean())


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("file", EXACT)
def test_exact_files_reproduce_the_checkpoint(file: str, split: list[int]) -> None:
    name, tolerance, relative = EXACT[file]
    expected = golden(name)
    with load(file, split) as model:
        for case in expected["cases"]:
            last = model.logits(case["ids"])[-1]
            for token, value in case["top"]:
                assert last[token] == pytest.approx(value, abs=tolerance)
        assert nll(model, expected["text_ids"]) == pytest.approx(expected["nll"], rel=relative)


@pytest.mark.parametrize(("split", "file"), paired(SPLITS[1:3], list(EXACT)), ids=str)
def test_exact_files_continue_like_the_checkpoint(file: str, split: list[int]) -> None:
    """Through the tokenizer, the cache and the sampler at temperature 0."""
    with load(file, split) as model:
        for case in golden(EXACT[file][0])["cases"]:
            n = len(case["greedy_ids"])
            assert model.tokenizer.encode(case["prompt"]) == case["ids"]
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            events = list(model.generate(case["ids"], params))
            texts = [event for event in events if isinstance(event, TokenText)]
            assert ids_of(texts) == case["greedy_ids"]
            text = case["prompt"] + "".join(event.text for event in texts)
            assert text.lstrip() == case["greedy_text"].lstrip(), "SPM puts a space in front"
            assert isinstance(events[-1], Finished)
            assert events[-1].reason == "length"


@pytest.mark.parametrize(("split", "file"), paired(SPLITS, list(LOSS)), ids=str)
def test_quantised_files_lose_no_more_than_in_llama_cpp(file: str, split: list[int]) -> None:
    name, loss = LOSS[file]
    expected = golden(name)
    with load(file, split) as model:
        ratio = np.exp(nll(model, expected["text_ids"]) - expected["nll"])
    assert 1 - SLACK <= ratio <= 1 + loss + SLACK


@pytest.mark.parametrize("file", LOSS)
def test_the_loss_is_the_files_own(file: str) -> None:
    """The same dequantised weights in plain float64 lose exactly as much."""
    path = golden_path("trained", f"{file}.gguf")
    ids = golden(LOSS[file][0])["text_ids"]
    plain = nll(PlainLlama(path), ids)
    for split in ([1], [3, 1]):
        with load(file, split) as model:
            assert nll(model, ids) == pytest.approx(plain, rel=1e-6)
