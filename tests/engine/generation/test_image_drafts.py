"""Answers about pictures say with guesses what they say without, whatever guesses."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import AnswerRequest, ChatMessage, Finished, Model, SamplingParams, load_model
from engine.decoding.drafting.ngram import NgramSource
from engine.generation.drafts import Drafts, MTPSource
from tests.helpers.answers import ids_of
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.pictures import prompt_of, random_picture, shown
from tests.helpers.prophet import Prophet, always

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SPOTS = random_picture(90, 60)
TWICE = [
    shown("the split model", SPOTS), ChatMessage("assistant", "hello world"),
    shown("the split model", SPOTS),
]  # fmt: skip
"""A text with the same picture twice, behind which the same tokens come."""


@pytest.fixture(
    scope="module", params=["gemma3", "qwen35", pytest.param("idefics3", marks=pytest.mark.slow)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a family of each kind; Qwen 3.5's with an MTP block."""
    found = tmp_path_factory.mktemp(request.param)
    next(family for family in SEEING if family.name == request.param).build(found)
    if request.param == "qwen35":
        with_mtp(found / "model.gguf")
    return found


def with_mtp(path: Path) -> None:
    """Add an MTP block to a file: its last block once more, and what joins pairs."""
    draft = ModelDraft.read(path)
    arch = draft.meta["general.architecture"]
    n_layer, n_embd = (draft.meta[f"{arch}.{key}"] for key in ("block_count", "embedding_length"))
    last = [name for name in draft.tensors if name.startswith(f"blk.{n_layer - 1}.")]
    for name in last:
        draft.tensors[re.sub(r"\d+", str(n_layer), name, count=1)] = draft.tensors[name]
    rng = np.random.default_rng(7)
    joint = rng.standard_normal((n_embd, 2 * n_embd), np.float32) / np.float32(n_embd**0.5)
    ones = np.ones(n_embd, np.float32)
    for part, values in (("eh_proj", joint), ("enorm", ones), ("hnorm", ones)):
        draft.tensors[f"blk.{n_layer}.nextn.{part}.weight"] = DraftTensor.of(values)
    lists = {
        key: [*value, value[-1]]
        for key, value in draft.meta.items()
        if key.startswith(arch) and isinstance(value, list) and len(value) == n_layer
    }
    sizes = {f"{arch}.block_count": n_layer + 1, f"{arch}.nextn_predict_layers": 1}
    draft.changed(lists | sizes).write(path)


def opened(folder: Path, **options: Any) -> Model:
    return load_model(folder / "model.gguf", **{"n_ctx": 512, "kv_type": "f32"} | options)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[int]]:
    with opened(folder, draft="off") as model:
        yield answered(model)[0]


def answered(model: Model) -> tuple[list[int], Finished]:
    events = list(model.answer(AnswerRequest(messages=tuple(TWICE), sampling=GREEDY)))
    end = events[-1]
    assert isinstance(end, Finished)
    return ids_of(events), end


def test_tokens_of_pictures_are_never_guessed(folder: Path, expected: list[int]) -> None:
    """One source knows that a picture comes next, another finds it behind the same words."""
    with opened(folder, draft="off") as model:
        prompt = prompt_of(model, TWICE)
        picture = next(iter(prompt.images.values()))
        known = [*prompt.ids, *expected[:2], *picture.ids]
        for source in (Prophet([known], lambda _: None), NgramSource()):
            model.scheduler.drafts = Drafts(7, [source], always())
            tokens, end = answered(model)
            assert tokens == expected
            assert end.usage.n_drafted or not isinstance(source, Prophet)


def test_right_and_wrong_guesses_behind_pictures_change_nothing(
    folder: Path, expected: list[int]
) -> None:
    with opened(folder, draft="off") as model:
        known = [*prompt_of(model, TWICE).ids, *expected]
        model.scheduler.drafts = Drafts(7, [Prophet([known], lambda n: n % 9)], always())
        tokens, end = answered(model)
        assert tokens == expected
        assert end.usage.n_accepted > 8


@pytest.mark.parametrize("folder", ["qwen35"], indirect=True)
@pytest.mark.parametrize("split", [(1,), (3, 1, 2)])
def test_an_mtp_block_reads_pictures(folder: Path, split: tuple[int, ...]) -> None:
    ranks = {"devices": ["cpu"] * len(split), "split": split}
    with opened(folder, **ranks, draft="off") as model:
        expected, _ = answered(model)
    with opened(folder, **ranks, draft="mtp") as model:
        model.scheduler.drafts = Drafts(3, [MTPSource(model.runtime.runner)], always())
        tokens, end = answered(model)
        assert end.usage.n_drafted > 20
        assert tokens == expected
        again, _ = answered(model)  # behind what is cached
        assert again == tokens


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_a_draft_model_reads_the_text_without_its_pictures(
    folder: Path, expected: list[int]
) -> None:
    """The model is its own draft model, which is right where pictures do not matter."""
    with opened(folder, draft=folder / "model.gguf") as model:
        draft = model._draft
        assert draft is not None
        model.scheduler.drafts = Drafts(7, [draft.source], always())
        tokens, end = answered(model)
        assert tokens == expected
        assert end.usage.n_drafted > 20
