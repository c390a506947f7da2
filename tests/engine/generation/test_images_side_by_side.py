"""Answers about pictures beside others: what each says, what passes hold, and how they end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import AnswerRequest, ChatMessage, Event, Finished, Model, SamplingParams, load_model
from engine.generation.sequence import Background
from engine.model.forward.batch import Batch
from engine.runtime import image_encoder
from engine.vision.encoders.ops import VisionOps
from tests.helpers.answers import ids_of
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.pictures import prompt_of, random_picture, shown

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ASKED = (
    [shown("the split model", random_picture(90, 60))],
    [ChatMessage("user", "hello world " * 20)],
    [shown("hello", random_picture(50, 120, seed=1), random_picture(70, 70, seed=2))],
)
"""Two conversations with pictures, and one between them without."""


@pytest.fixture(
    scope="module",
    params=["gemma3", "qwen35", pytest.param("idefics3", marks=pytest.mark.slow), "gemma4"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a family of each kind."""
    found = tmp_path_factory.mktemp(request.param)
    next(family for family in SEEING if family.name == request.param).build(found)
    return found


@pytest.fixture
def model(folder: Path) -> Iterator[Model]:
    options: dict[str, Any] = {"n_ctx": 512, "parallel": 3, "n_batch": 128, "draft": "off"}
    with load_model(folder / "model.gguf", **options) as found:
        yield found


def begun(model: Model, messages: list[ChatMessage]) -> Iterator[Event]:
    return model.answer(AnswerRequest(messages=tuple(messages), sampling=GREEDY))


def by_turns(streams: list[Iterator[Event]]) -> list[list[int]]:
    """Return the tokens of answers that are read event by event, by turns."""
    events: list[list[Event]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for n in list(left):
            event = next(streams[n], None)
            if event is None:
                left.remove(n)
            else:
                events[n].append(event)
    return [ids_of(found) for found in events]


def test_answers_at_once_are_those_alone_and_no_picture_is_cut(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []
    for messages in ASKED:
        alone += by_turns([begun(model, messages)])
        model.scheduler.cache.clear()  # so that all prompts are computed again
    monkeypatch.setattr(Background, "start", Background.run)  # no answer ends meanwhile
    batches: list[Batch] = []
    runner = model.runtime.runner
    plain = runner.sample
    monkeypatch.setattr(
        runner,
        "sample",
        lambda ids, batch, wishes: batches.append(batch) or plain(ids, batch, wishes),
    )
    assert by_turns([begun(model, messages) for messages in ASKED]) == alone
    mixed = [batch for batch in batches if batch.pictures and len(batch.pieces) > 1]
    assert mixed, "pictures were computed while another answer went on"
    for batch in batches:
        (first, *_) = batch.pieces
        for rows in batch.pictures:
            if rows.whole is not None:
                assert rows.whole[0] == first.n_past + rows.row
                assert rows.whole[1] == rows.whole[0] + len(rows.features) <= first.stop


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_an_answer_is_cancelled_inside_the_encoder(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_blocks: list[int] = []
    plain = VisionOps.attend_all

    def attend_all(self: VisionOps, *args: Any) -> Any:
        n_blocks.append(1)
        return plain(self, *args)

    monkeypatch.setattr(VisionOps, "attend_all", attend_all)
    asked = AnswerRequest(messages=tuple(ASKED[0]), sampling=GREEDY)
    *_, end = model.answer(asked, lambda: bool(n_blocks))
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert len(n_blocks) == 1
    (tokens,) = by_turns([begun(model, ASKED[0])])
    assert len(tokens) == GREEDY.max_tokens


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_results_of_the_encoder_are_kept_up_to_so_many_bytes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = model._images.encoder
    assert encoder is not None
    images = [random_picture(64, 64, seed=n) for n in range(5)]
    pictures = list(prompt_of(model, [shown("", *images)]).images.values())
    one = encoder.encode(pictures[0]).nbytes
    monkeypatch.setattr(image_encoder, "MAX_KEPT_BYTES", 3 * one + one // 2)
    for picture in pictures:
        encoder.encode(picture)
        assert sum(found.nbytes for found in encoder._kept.values()) <= 3 * one
    assert [encoder.has(picture) for picture in pictures] == [False, False, True, True, True]
    monkeypatch.setattr(image_encoder, "MAX_KEPT_BYTES", one // 2)
    encoder.encode(pictures[0])
    assert [encoder.has(picture) for picture in pictures] == [True, *[False] * 4]  # in use
