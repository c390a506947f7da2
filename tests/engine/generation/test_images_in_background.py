"""While the pictures of one conversation are read, others are answered."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import (
    AnswerRequest,
    ApplyTemplate,
    ChatMessage,
    Command,
    CountTokens,
    Failed,
    Finished,
    LoadParams,
    SamplingParams,
    load_model,
)
from engine.events import Load
from tests.helpers.answers import ids_of
from tests.helpers.desk import Desk
from tests.helpers.held_pictures import HeldPictures
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.pictures import random_picture, shown

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEN = (shown("the split model", random_picture(90, 60), random_picture(50, 120, seed=1)),)
LOOKING = AnswerRequest(messages=SEEN, sampling=GREEDY)
BLIND = AnswerRequest(messages=(ChatMessage("user", "hello"),), sampling=GREEDY)
QUESTIONS = [CountTokens(SEEN, "hello"), ApplyTemplate(SEEN)]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    next(family for family in SEEING if family.name == "gemma3").build(folder)
    return folder / "model.gguf"


@pytest.fixture
def desk(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    found = Desk()
    found.run(Load(LoadParams(str(model), n_ctx=512)))
    yield found
    assert found.host.close(WAIT_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldPictures:
    return HeldPictures(monkeypatch)


@pytest.mark.parametrize("looking", [LOOKING, *QUESTIONS], ids=lambda one: type(one).__name__)
def test_others_are_answered_meanwhile(desk: Desk, held: HeldPictures, looking: Command) -> None:
    number = desk.host.submit(looking)
    assert held.begun.wait(WAIT_S)
    assert isinstance(desk.run(BLIND), Finished)
    held.may_end.set()
    assert not isinstance(desk.closing(number), Failed)


@pytest.mark.parametrize("looking", [LOOKING, *QUESTIONS], ids=lambda one: type(one).__name__)
def test_a_reading_ends_with_its_command(desk: Desk, held: HeldPictures, looking: Command) -> None:
    number = desk.host.submit(looking)
    assert held.begun.wait(WAIT_S)
    desk.host.cancel(number)
    assert held.cancelled.wait(WAIT_S)
    assert isinstance(desk.closing(number), Finished | Failed)
    held.may_end.set()
    assert isinstance(desk.run(LOOKING), Finished)


def test_pictures_that_are_not_kept_are_read_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(model, n_ctx=512) as loaded:
        kept = ids_of(list(loaded.answer(LOOKING)))
    monkeypatch.setattr("engine.generation.image_prompts.MAX_KEPT_BYTES", 0)
    with load_model(model, n_ctx=512) as loaded:
        held = HeldPictures(monkeypatch)
        held.may_end.set()
        assert ids_of(list(loaded.answer(LOOKING))) == kept
        assert held.n_read == 2
