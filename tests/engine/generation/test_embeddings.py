"""Embeddings: hidden states of `transformers`, pooled as files say; sentences for the others."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Cancelled, ContextOverflow, EngineError, Model, SamplingParams, load_model
from engine.generation.queries import MEAN, RANK
from tests.helpers.golden import TOLERANCE, nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.tiny_gguf import tiny_gguf

BY_NAME = {family.name: family for family in FAMILIES}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "uneven": {"devices": ["cpu"] * 2, "split": [3, 1]},
    "by layers": {"devices": ["cpu"] * 2, "split_mode": "layer"},
}


def expected(states: torch.Tensor, pooling: int | None) -> torch.Tensor:
    """Return what llama.cpp's numbers mean, of states (T, n_embd); the last one for no number."""
    vector = {1: states.mean(0), 2: states[0]}.get(pooling or 0, states[-1])
    return vector / vector.norm()


@pytest.mark.parametrize(
    ("name", "pooling", "split"),
    [
        ("qwen3", 3, "uneven"), ("qwen3", 1, "by layers"), ("gemma3", 2, "uneven"),
        ("jamba", None, "whole"), ("mamba2", 1, "uneven"),
    ],
)  # fmt: skip
def test_vectors_are_pooled_hidden_states_of_transformers(
    tmp_path: Path, name: str, pooling: int | None, split: str
) -> None:
    family = BY_NAME[name]
    said = {} if pooling is None else {"pooling_type": pooling}
    family = replace(family, metadata=lambda c: {**BY_NAME[name].metadata(c), **said})
    theirs, ids = family.made(tmp_path / "m.gguf")
    texts = (ids, ids[5:12], ids[:1])
    with load_model(
        tmp_path / "m.gguf", kv_type="f32", n_ctx=64, n_batch=16, **SPLITS[split]
    ) as model:
        found = model.embed(texts)
    assert found.n_tokens == sum(map(len, texts))
    for vector, text in zip(found.vectors, texts, strict=True):
        with torch.no_grad():
            states = theirs.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        assert nmse(vector, expected(states, pooling)) <= TOLERANCE
        assert np.linalg.norm(vector) == pytest.approx(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Yield a model that wants BOS and EOS around a text."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    extra = {"tokenizer.ggml.add_eos_token": True, "llama.pooling_type": MEAN}
    with load_model(tiny_gguf(path, n_ctx=128, extra=extra), ["cpu", "cpu"], n_ctx=128) as loaded:
        yield loaded


def test_a_vector_is_the_same_alone_and_in_company(model: Model) -> None:
    """To the bit, also in the middle of an answer, which goes on as if nothing had been asked."""
    texts = ["hello world", "the split model", "hello world the tensor", "hello"]
    alone = [model.embed([text]).vectors[0] for text in texts]
    assert len(set(alone)) == 4
    assert model.embed(texts).vectors == tuple(alone)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = [event for event in model.generate("hello world", greedy) if hasattr(event, "ids")]
    answer, events = model.generate("hello world", greedy), []
    for text, vector in zip(texts, alone, strict=True):
        events += [next(answer), next(answer)]
        assert model.embed([text]).vectors == (vector,)
    events += [*answer]
    assert [event for event in events if hasattr(event, "ids")] == plain
    n_cached = model.n_cached
    assert model.embed(["hello"]).vectors == (alone[-1],)
    assert model.score([5, 6])
    assert model.n_cached == n_cached > 30, "the answer is still the last sequence"


def test_a_text_gets_what_the_model_wants_around_it_and_ids_stay_as_they_are(model: Model) -> None:
    bos, eos = model.tokenizer.bos_id, model.tokenizer.eos_id
    assert bos is not None
    assert eos is not None
    inner = model.tokenize("hello")
    text, whole, bare = model.embed(["hello", [bos, *inner, eos], inner]).vectors
    assert text == whole != bare
    assert model.embed(["</s>"]).n_tokens == 3, "a special token is one in a text"


def test_what_cannot_be_embedded_is_a_sentence(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ContextOverflow):
        model.embed(["hello", [5] * 129])
    with pytest.raises(EngineError, match="outside"):
        model.embed([[5, 10**6]])
    with pytest.raises(EngineError, match="empty"):
        model.embed([[]])
    with pytest.raises(Cancelled):
        model.embed(["hello"], lambda: True)
    monkeypatch.setattr("engine.generation.queries.MAX_NUMBERS", 128)
    assert len(model.embed(["a", "b"]).vectors) == 2
    with pytest.raises(EngineError, match="3 texts are too many"):
        model.embed(["a", "b", "c"])
    assert model.embed([]).vectors == ()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"pooling_type": RANK}, "it does not produce embeddings"),
        ({"pooling_type": 9}, "in a way that is not supported"),
        ({"attention.causal": False}, "reads text in both directions"),
    ],
    ids=["rank", "unknown", "both directions"],
)
def test_a_model_that_is_not_made_for_it_says_so(
    tmp_path: Path, keys: Mapping[str, Any], sentence: str
) -> None:
    extra = {f"llama.{key}": value for key, value in keys.items()}
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1, extra=extra)
    with load_model(path, n_ctx=32) as model, pytest.raises(EngineError, match=sentence):
        model.embed(["hello"])
