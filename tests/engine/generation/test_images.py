"""Conversations with pictures: what is cached, split anew, saved, and refused."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    Command,
    EngineError,
    Event,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    Model,
    ModelLoaded,
    SamplingParams,
    SaveState,
    StateSaved,
    ThreadHost,
    load_model,
)
from engine.text.messages import IMAGE_PLACEHOLDER, ImageFile
from tests.helpers.answers import ids_of, n_cached
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.model_draft import ModelDraft
from tests.helpers.pictures import as_file, prompt_logits, prompt_of, random_picture, shown

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIRST = shown("the split model", random_picture(90, 60), random_picture(50, 120, seed=1))
SECOND = [FIRST, ChatMessage("assistant", "hello"), ChatMessage("user", "world")]


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a family, which are written once; Gemma 3 unless a test says."""
    name = getattr(request, "param", "gemma3")
    found = tmp_path_factory.mktemp(name)
    next(family for family in SEEING if family.name == name).build(found)
    return found


KINDS = ("gemma3", "qwen35", "idefics3")
"""Families of each kind: with pictures that see themselves, with rows and columns, with tiles."""

all_families = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(family.name, marks=[] if family.name in KINDS else pytest.mark.slow)
        for family in SEEING
    ],
    indirect=True,
    scope="module",
)


def opened(folder: Path, **options: Any) -> Model:
    return load_model(folder / "model.gguf", **{"n_ctx": 512, "kv_type": "f32"} | options)


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[list[int]]:
    """Return the second answer of a model that has computed nothing before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_BACKEND", "reference")
        with opened(folder) as model:
            yield answered(model, SECOND)[0]


def answered(model: Model, messages: list[ChatMessage]) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt were cached."""
    events = list(model.answer(AnswerRequest(messages=tuple(messages), sampling=GREEDY)))
    return ids_of(events), n_cached(events)


def n_encoded(model: Model) -> int:
    assert model._images.encoder is not None
    return model._images.encoder.n_encoded


@all_families
def test_the_next_turn_finds_its_pictures_in_the_cache(folder: Path, fresh: list[int]) -> None:
    with opened(folder) as model:
        answered(model, [FIRST])
        tokens, cached = answered(model, SECOND)
        first = prompt_of(model, [FIRST])
        assert cached >= len(first.ids) - 8  # the assistant's turn begins otherwise
        assert tokens == fresh
        assert n_encoded(model) == len(first.images)  # or their tiles
        other = replace(FIRST, pictures=FIRST.pictures[::-1])
        assert answered(model, [other])[1] < 32
        assert n_encoded(model) == len(first.images)  # results are kept as well


@all_families
def test_pictures_survive_a_resplit_and_a_state_file(
    folder: Path, fresh: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "chat.state"
    with opened(folder) as model:
        answered(model, [FIRST])
        model.resplit([1, 2], devices=["cpu", "cpu"])
        assert answered(model, SECOND)[0] == fresh
        model.save_state(path)
        n_saved = model.n_cached
    with opened(folder) as model:
        model.load_state(path)
        tokens, cached = answered(model, SECOND)
        assert cached >= n_saved - 8
        assert tokens == fresh
        assert n_encoded(model) == 0


@all_families
def test_pieces_of_a_prompt_change_nothing(folder: Path, fresh: list[int]) -> None:
    n_batch = 96 if folder.name.startswith("gemma4") else 32  # with room for a whole picture
    with opened(folder, n_batch=n_batch) as model:
        assert model._images.encoder is not None
        assert answered(model, SECOND)[0] == fresh


@all_families
def test_tokens_behind_pictures_are_those_of_one_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels replay single tokens, whose positions are not their numbers everywhere."""
    monkeypatch.delenv("TANDEM_BACKEND")
    with opened(folder) as model:
        tokens, _ = answered(model, [FIRST])
        prompt = prompt_of(model, [FIRST])
        logits = prompt_logits(model, replace(prompt, ids=prompt.ids + tokens))
        assert tokens == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
        assert model.runtime.ranks[0].recordings  # so they were replayed


def test_pictures_stand_where_their_message_says(folder: Path) -> None:
    with opened(folder) as model:
        (one,) = shown("", random_picture(20, 20)).pictures
        text = f"hello {IMAGE_PLACEHOLDER} world {IMAGE_PLACEHOLDER}"
        ids = prompt_of(model, [ChatMessage("user", text, pictures=(one,))]).ids
        (picture,) = prompt_of(model, [ChatMessage("user", text, pictures=(one,))]).images.values()
        at = ids.index(picture.ids[0])
        assert model._prompts.tokenizer.decode(ids[:at]).endswith("hello \n\n<start_of_image>")
        assert model._prompts.tokenizer.decode(ids[at + picture.n :]).startswith(
            "<end_of_image>\n\n world"
        )


@all_families
def test_the_tokens_of_a_picture_follow_from_its_size(folder: Path) -> None:
    with opened(folder) as model:
        assert model.vision is not None
        assert model.vision.mmproj == str(folder / "mmproj.gguf")
        for width, height in ((90, 60), (50, 120)):
            read = model._prompts._read_images([shown("", random_picture(width, height))])
            n = sum(view.n for view in read[0].views)
            assert model.vision.n_tokens(width, height) == n
    with opened(folder, mmproj="off") as model:
        assert model.vision is None


def test_pictures_can_be_files_and_are_counted(folder: Path, tmp_path: Path) -> None:
    image = tmp_path / "spots.png"
    image.write_bytes(as_file(random_picture(90, 60)))
    (held,) = shown("", random_picture(90, 60)).pictures
    named, text = ImageFile(str(image)), "the split model"
    with opened(folder) as model:
        asked = [ChatMessage("user", text, pictures=(named,))]
        ids = prompt_of(model, asked).ids
        assert ids == prompt_of(model, [ChatMessage("user", text, pictures=(held,))]).ids
        n_before, *_ = model.count_tokens(asked, "hello")
        n_without, *_ = model.count_tokens([ChatMessage("user", text)], "hello")
        assert model.vision is not None
        assert n_before is not None
        assert n_without is not None
        assert n_before >= n_without + model.vision.n_tokens(90, 60)
        image.write_bytes(as_file(random_picture(90, 60, seed=1)))
        assert prompt_of(model, asked).ids != ids
        image.unlink()
        with pytest.raises(EngineError, match="An image cannot be read: No such file"):
            prompt_of(model, asked)


def test_a_host_saves_the_state_of_an_answer_and_tells_how_the_model_sees(
    folder: Path, tmp_path: Path
) -> None:
    events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
    host = ThreadHost(events.put)

    def closing(command: Command) -> tuple[int, Event]:
        number = host.submit(command)
        while True:
            found = events.get(timeout=60)
            if isinstance(found.event, ModelLoaded | Finished | StateSaved | Failed):
                return number, found.event

    try:
        _, loaded = closing(Load(LoadParams(str(folder / "model.gguf"), n_ctx=512)))
        assert isinstance(loaded, ModelLoaded)
        assert loaded.vision is not None
        assert loaded.vision.mmproj == str(folder / "mmproj.gguf")
        number, finished = closing(AnswerRequest(messages=(FIRST,), sampling=GREEDY))
        assert isinstance(finished, Finished)
        _, saved = closing(SaveState(str(tmp_path / "state"), number))
        assert isinstance(saved, StateSaved)
        assert saved.n_tokens == finished.usage.total_tokens - 1
    finally:
        host.close()


def test_a_conversation_with_pictures_is_not_shifted(folder: Path) -> None:
    sampling = replace(GREEDY, max_tokens=200, on_overflow="shift")
    with opened(folder, n_ctx=128) as model:
        events = list(model.answer(AnswerRequest(messages=(FIRST,), sampling=sampling)))
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.reason == "context"


def test_the_plan_counts_the_encoder(folder: Path) -> None:
    with opened(folder, devices=["cpu", "cpu"], split=[1, 3]) as model:
        predicted = [memory.predicted.pictures for memory in model.memory()]
        measured = [memory.measured.pictures for memory in model.memory()]
    assert predicted[0] == measured[0] == 0
    file = gguf.GGUFReader(folder / "mmproj.gguf")
    assert measured[1] == sum(tensor.n_bytes for tensor in file.tensors)
    assert predicted[1] > measured[1]


def test_what_cannot_see_says_so(folder: Path, tmp_path: Path) -> None:
    with opened(folder, mmproj="off") as model, pytest.raises(EngineError) as told:
        answered(model, [FIRST])
    assert "cannot see images: no mmproj file is loaded" in str(told.value)
    with opened(folder) as model:
        broken = replace(FIRST, pictures=("AAAA",))
        with pytest.raises(EngineError, match="An image cannot be used"):
            answered(model, [broken])
        assert answered(model, [FIRST])[0]  # and the model goes on


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"clip.projector_type": "hyperlens"}, "a projector of type 'hyperlens'"),
        ({"clip.projector_type": "a\nb"}, r"a projector of type 'a\\nb'"),
        ({"clip.vision.projection_dim": 128}, "is for another model: it fits gemma3"),
        ({"clip.vision.image_std": [0.0, 0.0, 0.0]}, "standard deviations of its colour channels"),
        ({"general.architecture": "llama"}, "has no vision encoder"),
        (
            {"clip.has_vision_encoder": False, "clip.has_audio_encoder": True},
            "has no vision encoder",
        ),
        ({"clip.vision.block_count": 0}, "sizes of its vision encoder contradict"),
        ({"clip.vision.attention.head_count": 7}, "sizes of its vision encoder contradict"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_not_found_beside(
    folder: Path, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    draft = ModelDraft.read(folder / "mmproj.gguf")
    draft.meta |= change
    wrong = draft.write(tmp_path / "mmproj-wrong.gguf")
    with pytest.raises(EngineError, match=problem):
        opened(folder, mmproj=wrong)
    (tmp_path / "model.gguf").symlink_to(folder / "model.gguf")
    with opened(tmp_path) as model:
        assert model._images.encoder is None


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_file_that_ends_too_early_is_told(folder: Path, tmp_path: Path, part: float) -> None:
    whole = (folder / "mmproj.gguf").read_bytes()
    short = tmp_path / "mmproj-short.gguf"
    short.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(EngineError, match=r"mmproj-short\.gguf"):
        opened(folder, mmproj=short)


def test_batches_too_small_for_a_picture_are_told(folder: Path) -> None:
    with pytest.raises(EngineError, match="to read images; the batch size is 16"):
        opened(folder, n_batch=16, mmproj=folder / "mmproj.gguf")
    with opened(folder, n_batch=16) as model:
        assert any("batches of at least 32" in warning for warning in model.warnings)
