"""What the engine says in a German window: errors that people provoke, reasons and warnings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.core.paths import demo_model
from app.core.translation import error_text, translated, use_language
from engine import (
    AnswerRequest,
    ChatMessage,
    ContextOverflow,
    EngineError,
    Grammar,
    ImageFile,
    LoadParams,
    Model,
    OutOfDeviceMemory,
    Planner,
    PlanStore,
    SamplingParams,
    SavedPlan,
    Sentence,
    check_grammar,
    import_plan,
    load_model,
    model_key,
    parse_rig,
)
from engine.errors import CommError, DeviceStopped, KernelError, ModelBusy
from engine.hosts.process.child import Death, crash_of
from engine.hosts.process.codec import Codec
from engine.planning.search.results import DraftTrial, reason_for_drafts
from tests.helpers.tiny_gguf import split_gguf, tiny_gguf

GIB = 1 << 30
ENGLISH = re.compile(
    r"\b(the|is|are|of|and|or|with|cannot|has|have|no|not|for|to|it|its|this|load|choose|file)\b"
)
"""Words that no German sentence has."""

QUESTION = (ChatMessage("user", "Hello"),)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(demo_model(), devices="cpu", n_ctx=256) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def _german() -> Iterator[None]:
    use_language("de")
    yield
    use_language("en")


def plan_of(path: Path, **options: object) -> object:
    return Planner(str(path)).plan(LoadParams(str(path), **options))  # type: ignore[arg-type]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def without_second_part(folder: Path) -> Path:
    first, second = split_gguf(tiny_gguf(folder / "m.gguf"), 2)
    second.unlink()
    return first


FILES: dict[str, Callable[[Path], object]] = {
    "missing file": lambda at: plan_of(at / "none.gguf"),
    "folder": lambda at: plan_of(at),
    "text file": lambda at: plan_of(written(at / "a.gguf", b"Hello, this is a text")),
    "empty file": lambda at: plan_of(written(at / "a.gguf", b"")),
    "header cut off": lambda at: plan_of(
        written(at / "a.gguf", tiny_gguf(at / "m.gguf").read_bytes()[:200])
    ),
    "weights cut off": lambda at: plan_of(
        written(at / "a.gguf", tiny_gguf(at / "m.gguf").read_bytes()[:-5000])
    ),
    "part missing": lambda at: plan_of(without_second_part(at)),
    "no device": lambda at: load_model(demo_model(), devices="cuda:9"),
    "no plan file": lambda at: import_plan(written(at / "p.json", b"{}")),
    "plan file is no JSON": lambda at: import_plan(written(at / "p.json", b"{{")),
    "no such plan": lambda at: PlanStore(at).find(model_key(str(demo_model())), "fast"),
    "plan named auto": lambda at: SavedPlan.of("auto", LoadParams("m"), ()),
    "plan for other devices": lambda at: SavedPlan.of(
        "p", LoadParams("m", devices=("cuda:7",)), ()
    ).resolved("m", ()),
    "negative context": lambda at: LoadParams("m", n_ctx=-1),
    "KV cache type": lambda at: LoadParams("m", kv_type="q9"),
    "split mode": lambda at: LoadParams("m", split_mode="diagonal"),
    "temperature": lambda at: SamplingParams(temperature=-1),
    "max tokens": lambda at: SamplingParams(max_tokens=-5),
    "rig": lambda at: parse_rig("3xtoaster"),
    "JSON schema": lambda at: check_grammar(Grammar("json_schema", "[")),
    "regular expression": lambda at: check_grammar(Grammar("regex", "(")),
    "GBNF": lambda at: check_grammar(Grammar("gbnf", "root :=")),
}  # fmt: skip

RAISED: dict[str, EngineError] = {
    "memory": OutOfDeviceMemory("cuda:0", 9 * GIB, 4 * GIB, Sentence("to load the model")),
    "full context": ContextOverflow(5000, 4096),
    "full context, last message": ContextOverflow(5000, 4096, 4500),
    "GPU stopped": DeviceStopped("cuda:0", Sentence("an illegal address")),
    "rank lost": CommError(1, Sentence("lost the other ranks in the middle of a step"), "cuda:1"),
    "busy": ModelBusy(Sentence("it is being re-split")),
    "crash": crash_of(Death(1, "", (), False), Sentence("while it was starting")),
    "kernels": KernelError("cuda:0", "CUDA error 700"),
}

ANSWERS: dict[str, AnswerRequest] = {
    "no message": AnswerRequest(()),
    "empty prompt": AnswerRequest(prompt=""),
    "long prompt": AnswerRequest(prompt="word " * 500),
    "image": AnswerRequest((ChatMessage("user", "Hi", pictures=(ImageFile(b"x"),)),)),
    "suffix": AnswerRequest(QUESTION, suffix="x"),
}


def said(act: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        act()
    return caught.value


def check_german(error: EngineError) -> None:
    for text in filter(None, (error.message, error.hint)):
        assert isinstance(text, Sentence)
        shown = re.sub(r"„[^“]*“|\S+[/.]\S+|--\S+", "", translated(text))  # names, paths, options
        assert shown != str(text)
        assert not ENGLISH.findall(shown), shown


@pytest.mark.parametrize("case", FILES)
def test_a_provoked_error_is_german(case: str, tmp_path: Path) -> None:
    check_german(said(lambda: FILES[case](tmp_path)))


@pytest.mark.parametrize("case", RAISED)
def test_an_error_of_a_device_is_german(case: str) -> None:
    check_german(RAISED[case])


@pytest.mark.parametrize("case", ANSWERS)
def test_a_refused_request_is_german(case: str, model: Model) -> None:
    check_german(said(lambda: list(model.answer(ANSWERS[case]))))


def test_an_error_stays_a_template_across_processes() -> None:
    codec: Codec[EngineError] = Codec(EngineError)
    error = OutOfDeviceMemory("cuda:0", 9 * GIB, 4 * GIB, Sentence("to load the model"))
    again = codec.unpack(codec.pack(error))
    assert str(again) == str(error)
    assert error_text(again) == error_text(error)
    assert "4,00 GiB" in error_text(again), "a decimal comma"


def test_reasons_are_put_together_in_german() -> None:
    trials = [DraftTrial("off", 20.0, 20.0), DraftTrial("mtp", 30.0, 20.0)]
    shown = translated(reason_for_drafts(trials))
    assert not ENGLISH.findall(shown), shown
    assert "1,50" in shown


def test_other_text_and_an_english_window_stay_as_they_are() -> None:
    assert translated("Some text") == "Some text"
    use_language("en")
    error = RAISED["memory"]
    assert error_text(error) == f"{error.message} {error.hint}"
