"""The engine's commonest sentences, in German."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.engine_sentences import _SENTENCE_END, FORMS, _pattern, translated
from app.notice import Notice
from app.server.web.running import _not_listening
from app.translation import use_language
from engine import GOALS, EngineError, LoadParams, Sample, Trial, TuneResult
from engine.errors import (
    ANOTHER_TEMPLATE,
    ContextOverflow,
    DeviceStopped,
    InvalidGGUF,
    MissingShard,
    NoDevice,
    OutOfDeviceMemory,
    TemplateError,
    UnsupportedArchitecture,
    UnsupportedQuant,
)
from engine.planning.choice_reason import reason_for_choice
from engine.planning.machines.machine_choice import MachineSpeed, reason_for_machines
from engine.planning.search.draft_results import DraftTrial, reason_for_drafts
from engine.planning.search.results import _note_on_others, _note_on_rounds, reason_for_best
from engine.planning.speed.prediction import REASONS
from engine.remote.death import Death, crash_of
from tests.engine.planning.test_choice_reason import ONE, TWO, split, told

GIB = 1 << 30
ALONE, BOTH, ALL = (
    MachineSpeed(numbers, split(ONE, speed))
    for numbers, speed in (((1,), 9.0), ((0, 1), 5.0), ((0, 1, 2), 4.0))
)
MADE = (
    InvalidGGUF("/m/a.gguf", "it is cut"),
    InvalidGGUF("/m/a.gguf", "it does not begin with 'GGUF'"),
    EngineError("There is no file /m/a.gguf.", "It may have been moved or deleted."),
    MissingShard("/m/a-1.gguf", ["a-2.gguf", "a-3.gguf"]),
    UnsupportedArchitecture("/m/a.gguf", "qwen99", ["qwen3", "llama"]),
    UnsupportedArchitecture("/m/a.gguf", "zzz", ["qwen3", "llama"]),
    UnsupportedQuant("/m/a.gguf", "Q9", "output.weight"),
    NoDevice("cuda:9"),
    OutOfDeviceMemory("cuda:0", 9 * GIB, 4 * GIB, "to load the model"),
    ContextOverflow(5000, 4096),
    ContextOverflow(5000, 4096, 4500),
    EngineError("The model has been unloaded."),
    DeviceStopped("cuda:0", "an illegal address"),
    TemplateError("", ANOTHER_TEMPLATE),
    EngineError(
        "The plans cannot be written to /p/a.json: No space left on device.",
        "Make room on its disk, or permit writing there, then try again.",
    ),
    EngineError(
        "/p/a.json cannot be written: No space left on device.",
        "Choose another folder, or make room on its disk.",
    ),
    crash_of(Death(1, "", (), False), "while it was idle"),
    *(_not_listening("127.0.0.1", 80, OSError(n, "")) for n in (errno.EADDRINUSE, errno.EACCES)),
)


def tried(devices: tuple[str, ...], decode: float, waited_s: tuple[float, ...] = ()) -> Trial:
    """Return a trial over devices of equal shares."""
    shares = (1 / len(devices),) * len(devices)
    sample = Sample((10 * decode,), (decode,), waited_s, waited_s)
    return Trial(LoadParams("m", devices), shares, sample)


GPUS, CPUS = ("cuda:0", "cuda:1"), ("cpu", "cpu")
TWO_RANKS = ("cpu", "cpu", "cuda:0")
SEARCHES = (
    *(
        reason_for_best(trials, GOALS["chat"])
        for trials in (
            [],
            [tried(("cpu",), 10.0)],
            [tried(("cuda:0",), 10.0), tried(("cuda:1",), 5.0)],
            [tried(("cuda:0",), 10.0), tried(GPUS, 5.0, (0.05, 0.1))],
            [tried(("cuda:0",), 10.0), tried(GPUS, 10.01)],
            [tried(GPUS, 10.0)],
            [tried(GPUS, 10.0), tried(TWO_RANKS, 9.0)],
            [tried(TWO_RANKS, 10.0), tried(("cpu",), 5.0)],
        )
    ),
    _note_on_rounds(
        TuneResult(
            "m", "h", 512, "", GOALS["chat"], best=0,
            trials=(
                replace(tried(GPUS, 9.0), is_final=True),
                replace(tried(CPUS, 8.0), is_final=True), tried(("cpu",), 10.0),
            ),
        )
    ),
    _note_on_others((("cpu", 34.0), ("cuda:1", 3.0))),
    reason_for_drafts([DraftTrial(way, 20.0, 20.0) for way in ("off", "ngram")]),
    reason_for_drafts([DraftTrial("off", 20.0, 20.0), DraftTrial("mtp", 30.0, 20.0),
                       DraftTrial("model", 30.0, 40.0)]),
)  # fmt: skip
SPEEDS = (
    *(reason.format(part="47 %") for reason in REASONS.values()),
    "GPU 2 is slower; the other waits for it 32 % of the time.",
    "CPU 1 is slowest; the others wait for it 32 % of the time.",
    told(split(ONE, 9.14), gpus=ONE), told(split(("cpu",), 2.14), gpus=()),
    told(split(ONE, 9.14), gpus=TWO), reason_for_choice(None, (), ()),
    *reason_for_machines(BOTH, ALONE, ALONE).replace(". ", ".|").split("|"),
    *(part for text in SEARCHES for part in _SENTENCE_END.split(text)),
    *reason_for_machines(ALL, None, ALL).replace(". ", ".|").split("|"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _german() -> Iterator[None]:
    use_language("de")
    yield
    use_language("en")


def test_each_form_is_one_that_the_engine_makes() -> None:
    made = [*SPEEDS, *(text for error in MADE for text in (error.message, error.hint))]
    unused = [form for form in FORMS if not any(_pattern(form).fullmatch(text) for text in made)]
    assert unused == []


def test_names_and_numbers_are_filled_in() -> None:
    assert translated("The CPU alone, as there is no GPU.") == (
        "Nur die CPU, denn es gibt keine GPU."
    )
    assert translated("The CPU is slower; the other waits for it 32 % of the time.").startswith(
        "Die CPU ist langsamer"
    )
    notice = Notice.of(OutOfDeviceMemory("cuda:0", 9 * GIB, 4 * GIB, "to load the model"))
    assert "4,00 GiB" in notice.text
    assert "9,00 GiB" in notice.text
    assert "needed" not in notice.text
    assert "Kontext" in notice.hint
    error = UnsupportedQuant("/m/Llama-3.1.gguf", "Q9", "output.weight")
    assert Notice.of(error).text.startswith("Llama-3.1.gguf ")


@pytest.mark.parametrize("text", SEARCHES)
def test_what_a_search_has_found_is_said_without_english_words(text: str) -> None:
    said = translated(text)
    left = re.findall(r"(?i)\b(the|alone|gives|split|over|and|at|ranks on|those|other)\b", said)
    assert left == [], said
    for number in re.findall(r"\d+", text):
        assert number in said


def test_names_of_devices_are_put_together_in_german() -> None:
    text = "Splitting over 2 ranks on the CPU, GPU 0 and GPU 0 of machine 2 at 50 % + 25 % + 25 %"
    text += " gives 9.5 tok/s (95 tok/s for prompts); no device holds the model alone."
    assert translated(text) == (
        "Die Aufteilung über 2 Ranks auf der CPU, GPU 0 und GPU 0 von Maschine 2 mit"
        " 50 % + 25 % + 25 % erreicht 9,5 tok/s (95 tok/s bei Prompts); kein Gerät fasst das Modell"
        " allein."
    )


def test_sentences_that_are_not_known_stay() -> None:
    text = "Something else has happened. Put all parts into one folder."
    assert translated(text) == (
        "Something else has happened. Legen Sie alle Teile in einen Ordner."
    )
    use_language("en")
    assert translated(text) == text
