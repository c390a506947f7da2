"""Pixels, tokens, towers and whole prompts against `transformers`, on random models that see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import AnswerRequest, ChatMessage, Model, SamplingParams, load_model
from engine.vision.images.placed import FIRST_ID
from tests.helpers.answers import ids_of, n_cached
from tests.helpers.golden import TOLERANCE, nmse
from tests.helpers.hf_models.seeing import SEEING, SeeingFamily
from tests.helpers.pictures import prompt_logits, prompt_of, random_picture, shown

QUESTION = "the split model"
N_CTX = 512


@dataclass(frozen=True)
class Seeing:
    """A family's files, its model in `transformers`, and what that makes of two pictures."""

    family: SeeingFamily
    folder: Path
    theirs: Any
    images: list[Any]
    inputs: Any
    one_rank: Model

    @property
    def messages(self) -> list[ChatMessage]:
        return [shown(QUESTION, *self.images)]


@pytest.fixture(scope="module", params=SEEING, ids=lambda family: family.name)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    theirs = family.build(folder)
    images = [random_picture(100, 70), random_picture(61, 130, seed=1)]
    inputs = family.processor(images, return_tensors="pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_BACKEND", "reference")
        with load_model(folder / "model.gguf", kv_type="f32", n_ctx=N_CTX) as model:
            yield Seeing(family, folder, theirs, images, inputs, model)


def expected_ids(seeing: Seeing) -> list[int]:
    """Return the ids of the prompt with the token that stands for pictures in `transformers`."""
    model, family = seeing.one_rank, seeing.family
    pictures = "".join(family.written(seeing.inputs))
    text = model._prompts.written([ChatMessage("user", "PICTURES" + QUESTION)])
    return model._prompts.plain(text.replace("PICTURES", pictures)).ids


def their_logits(seeing: Seeing, ids: list[int]) -> Any:
    """Return the logits of `transformers` of all tokens of a prompt."""
    family = seeing.family
    types = torch.tensor([[int(token == family.id_of(family.holder)) for token in ids]])
    known = {**seeing.inputs, "mm_token_type_ids": types, "token_type_ids": types}
    inputs = {name: known[name] for name in family.takes}
    if family.has_own_masks:
        like = torch.empty(1, len(ids), 1)
        inputs["attention_mask"] = seeing.theirs.create_masks_for_generate(
            seeing.theirs.config, like, None, None, None, mm_token_type_ids=types
        )
    with torch.no_grad():
        return seeing.theirs(input_ids=torch.tensor([ids]), **inputs).logits[0].numpy()


def test_pixels_equal_those_of_the_image_processor(seeing: Seeing) -> None:
    encoder = seeing.one_rank._images.encoder
    assert encoder is not None
    pictures = list(prompt_of(seeing.one_rank, seeing.messages).images.values())
    wanted = seeing.family.pixels(seeing.inputs)
    for picture, theirs in zip(pictures, wanted, strict=True):
        ours = encoder._normalised(picture)
        assert (ours - theirs).abs().max() <= 1 / 255 / min(picture.rule.std)


def test_tokens_equal_those_of_the_processor(seeing: Seeing) -> None:
    family = seeing.family
    holder = family.id_of(family.holder)
    inside = [holder, *map(family.id_of, family.breaks)]
    ids = prompt_of(seeing.one_rank, seeing.messages).ids
    assert [holder if token >= FIRST_ID else token for token in ids] == [
        holder if token in inside else token for token in expected_ids(seeing)
    ]


def test_features_equal_transformers(seeing: Seeing) -> None:
    encoder = seeing.one_rank._images.encoder
    assert encoder is not None
    pictures = prompt_of(seeing.one_rank, seeing.messages).images.values()
    ours = np.concatenate([encoder.encode(picture).numpy() for picture in pictures])
    assert nmse(ours, seeing.family.features(seeing.theirs, seeing.inputs)) <= TOLERANCE


def test_logits_of_a_prompt_equal_transformers_on_one_and_three_ranks(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    wanted = their_logits(seeing, expected_ids(seeing))
    one = seeing.one_rank
    assert nmse(prompt_logits(one, prompt_of(one, seeing.messages)), wanted) <= TOLERANCE
    path = seeing.folder / "model.gguf"
    with load_model(path, ["cpu"] * 3, [3, 1, 2], kv_type="f32", n_ctx=N_CTX) as three:
        assert nmse(prompt_logits(three, prompt_of(three, seeing.messages)), wanted) <= TOLERANCE
        for memory in three.memory():
            assert memory.measured.pictures <= memory.predicted.pictures


def greedy(model: Model, messages: list[ChatMessage], n: int = 6) -> tuple[list[int], int]:
    """Return the likeliest tokens of an answer, and how many of its prompt were cached."""
    sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    events = list(model.answer(AnswerRequest(messages=tuple(messages), sampling=sampling)))
    return ids_of(events), n_cached(events)


def test_an_answer_goes_on_from_pictures(seeing: Seeing) -> None:
    """Each token is the likeliest one behind those before, which `transformers` computes afresh."""
    tokens, _ = greedy(seeing.one_rank, seeing.messages)
    prompt = expected_ids(seeing)
    logits = their_logits(seeing, prompt + tokens)
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
