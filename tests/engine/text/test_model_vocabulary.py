"""Models whose file has no vocabulary, a foreign one, or one that is cut in an unknown way."""

from pathlib import Path
from typing import Any

import pytest

from engine import Finished, ModelFileError, PromptError, SamplingParams, inspect_model, load_model
from tests.helpers.tiny_gguf import tiny_gguf

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
FOREIGN = ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace", "from the\x1b[2J future"]


@pytest.mark.parametrize("extra", [{MODEL: "none"}, {MODEL: "no_vocab"}, {MODEL: ""}, {}], ids=str)
def test_a_model_without_vocabulary_computes_logits(tmp_path: Path, extra: dict[str, Any]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer=False, extra=extra)
    with load_model(path) as model:
        assert model.logits([1, 2, 3]).shape == (3, 64)
        events = list(model.generate([1, 2], SamplingParams(temperature=0, max_tokens=4)))
        assert isinstance(events[-1], Finished)
        with pytest.raises(PromptError, match="no vocabulary"):
            list(model.generate("text"))
        assert "has no vocabulary" in model.warnings[0]
    assert inspect_model(path).warnings == model.warnings


def test_tokens_that_a_file_bans_are_never_sampled(tmp_path: Path) -> None:
    """Gemma 4 lists placeholders that its checkpoints sometimes prefer; odd ids are skipped."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    banned: list[int] = []
    for _ in range(3):
        extra = {"tokenizer.ggml.suppress_tokens": [*banned, -1, 10**6]}
        path = tiny_gguf(tmp_path / "m.gguf", extra=extra)
        with load_model(path) as model:
            events = list(model.generate([5, 6], greedy))
        sampled = [i for event in events for i in getattr(event, "ids", ())]
        assert len(sampled) == 8
        assert not set(sampled) & set(banned)
        banned += sampled


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_vocabulary_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    """No architecture that can be loaded was ever published with one of these."""
    path = tiny_gguf(tmp_path / "m.gguf", extra={MODEL: name})
    with pytest.raises(ModelFileError) as raised:
        load_model(path)
    sentence = f"m.gguf uses the tokenizer {name!r}, which is not supported yet."
    assert raised.value.message == sentence
    assert raised.value.hint == "Supported tokenizers: llama, gpt2, gemma4."
    assert inspect_model(path).warnings == (sentence,)


@pytest.mark.parametrize(
    ("pre", "problem"),
    [
        ("from-the-future", "The pre-tokenizer 'from-the-future' is unknown"),
        ("\x1b[2J", "The pre-tokenizer '\\x1b[2J' is unknown"),
        ("", "The file names no pre-tokenizer"),
        (None, "The file names no pre-tokenizer"),
    ],
)
def test_an_unknown_cut_is_replaced_and_said(tmp_path: Path, pre: str | None, problem: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch="qwen2", extra={PRE: pre}, chat_template="{{ 1 }}")
    sentence = f"{problem}, so the default is used and answers may be worse."
    assert inspect_model(path).warnings == (sentence,)
    with load_model(path) as model:
        assert model.warnings == (sentence,)
        ids = model.tokenizer.encode("hello 12 world")
        assert model.tokenizer.decode(ids) == "hello 12 world"


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_sound_vocabulary_is_passed_over_in_silence(tmp_path: Path, arch: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch=arch, chat_template="{{ 1 }}")
    assert inspect_model(path).warnings == ()
    with load_model(path) as model:
        assert model.warnings == ()


def test_a_name_that_is_no_text_is_said(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch="qwen2", extra={PRE: 7})
    (sentence,) = inspect_model(path).warnings
    assert PRE in sentence
    with pytest.raises(ModelFileError, match=PRE):
        load_model(path)
