"""Text that fills a gap: the prompt as the model was trained for it, and where the answer ends."""

from pathlib import Path

import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    Event,
    Finished,
    Model,
    PromptError,
    SamplingParams,
    TokenText,
    load_model,
)
from tests.helpers.tiny_gguf import tiny_gguf
from tests.helpers.vocabularies import CONTROL, bpe, spm, tokenizer

NAMES = [f"<|fim_{role}|>" for role in ("prefix", "suffix", "middle", "pad")]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
KEY = "tokenizer.ggml.fim_{}_token_id"
PRE, SUF, MID, SEP = 70, 66, 68, 61
"""Ids that a file gives to tokens of its own for the roles."""


def model_of(path: Path, *roles: str) -> Model:
    ids = {"pre": PRE, "suf": SUF, "mid": MID, "sep": SEP}
    extra = {KEY.format(role): ids[role] for role in roles}
    return load_model(tiny_gguf(path, n_ctx=64, extra=extra), n_ctx=64, kv_type="f32")


def ids_of(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def test_the_prompt_is_prefix_suffix_middle(tmp_path: Path) -> None:
    with model_of(tmp_path / "m.gguf", "pre", "suf", "mid") as model:
        before, behind = "hello </s>", "the split"
        first, second = (model.tokenize(x, parse_special=False) for x in (before, behind))
        expected = [model.tokenizer.bos_id, PRE, *first, SUF, *second, MID]
        assert model.tokenizer.eos_id not in first, "a special token's spelling is text"
        events = list(model.answer(AnswerRequest(prompt=before, suffix=behind, sampling=GREEDY)))
        whole = tuple(i for i in expected if i is not None)
        alike = list(model.answer(AnswerRequest(prompt=whole, sampling=GREEDY)))
        from_ids = AnswerRequest(prompt=tuple(first), suffix=behind, sampling=GREEDY)
        assert ids_of(list(model.answer(from_ids))) == ids_of(alike)
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.prompt_tokens == len(expected)
        assert ids_of(events) == ids_of(alike) != []
        alone = list(model.answer(AnswerRequest(prompt=before, sampling=GREEDY)))
        assert ids_of(alone) != ids_of(events), "without a suffix it is a plain prompt"
        with pytest.raises(PromptError, match="not with messages"):
            list(model.answer(AnswerRequest((ChatMessage("user", "hello"),), suffix=behind)))


def test_a_model_without_such_tokens_says_so(tmp_path: Path) -> None:
    with (
        model_of(tmp_path / "m.gguf", "pre", "suf") as model,
        pytest.raises(PromptError, match="tiny llama cannot fill in text"),
    ):
        list(model.answer(AnswerRequest(prompt="hello", suffix="world")))


@pytest.mark.parametrize("has_keys", [True, False])
def test_the_tokens_are_those_of_the_file_s_keys_or_known_by_their_names(has_keys: bool) -> None:
    vocabulary = bpe(["a b"], dict.fromkeys([*NAMES, "<|file_sep|>", "<|repo_name|>"], CONTROL))
    found = {name: 257 + n for n, name in enumerate([*NAMES, "<|file_sep|>", "<|repo_name|>"])}
    keys = {"fim_pre_token_id": 5, "fim_sep_token_id": 6} if has_keys else {}
    tok = tokenizer({**vocabulary, **keys})
    assert tok.fill_in_ids == (5 if has_keys else 257, 258, 259)
    ends = {found["<|fim_pad|>"], 6 if has_keys else found["<|file_sep|>"], found["<|repo_name|>"]}
    assert ends <= tok.eog_ids, "an answer ends there"
    assert not tok.eog_ids & {257, 258, 259}
    assert tokenizer(spm({"▁": -1.0})).fill_in_ids is None
