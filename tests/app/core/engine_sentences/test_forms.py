"""The engine's commonest sentences, in German."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.core.engine_sentences import reason_of, translated
from app.core.engine_sentences.forms import PROBLEM_FORMS, SYSTEM_FORMS
from app.core.engine_sentences.translating import FORMS, SENTENCE_END, pattern
from app.core.notice import Notice
from app.core.translation import use_language
from app.server.web.server import _not_listening
from engine import GOALS, EngineError, LoadParams, Sample, Trial, TuneResult
from engine.errors import (
    ANOTHER_TEMPLATE,
    CommError,
    ContextOverflow,
    DeviceStopped,
    InvalidGGUF,
    KernelError,
    MissingShard,
    NoDevice,
    OutOfDeviceMemory,
    Sentence,
    TemplateError,
    UnsupportedArchitecture,
    UnsupportedQuant,
)
from engine.hosts.process.child import Death, crash_of
from engine.planning.choice import reason_for_choice
from engine.planning.machines import MachineSpeed, reason_for_machines
from engine.planning.search.results import (
    DraftTrial,
    _note_on_others,
    _note_on_rounds,
    reason_for_best,
    reason_for_drafts,
)
from engine.planning.speed.facts import REASONS, SHORT_REASONS
from tests.engine.planning.test_choice_reason import FOUR, ONE, TWO, split, told
from tests.helpers.engine_errors import LISTED, all_texts, untranslated

GIB = 1 << 30
PAIRS = split(FOUR, 40, "groups", groups=(2, 2), n_sum=96, sum_us=5)
SLOWEST = Sentence(
    "because {device} is slowest; the others wait for it {part} of the time",
    device="GPU 1", part="62 %",
)  # fmt: skip
SLOWER = Sentence(
    "because {device} is slower; the other waits for it {part} of the time",
    device=Sentence("the CPU"), part="9 %",
)  # fmt: skip
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
    ContextOverflow(5000, 4096, is_counted=False),
    ContextOverflow(5000, 4096, 4500, is_counted=False),
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
    *(part for text in SEARCHES for part in SENTENCE_END.split(text)),
    *reason_for_machines(ALL, None, ALL).replace(". ", ".|").split("|"),
)  # fmt: skip


REASONS_FOR_CHOICES = (
    told(split(ONE, 61.2), split(TWO, 48.1, n_sum=96, sum_us=70)),
    told(split(ONE, 61), split(TWO, 30, n_sum=1, why=SLOWEST)),
    told(split(ONE, 61), split(TWO, 30, n_sum=1, why=SLOWER)),
    told(split(ONE, 61), split(TWO, 30, "layer")),
    told(split(ONE, 61), split(TWO, 64, n_sum=96, sum_us=13)),
    told(split(ONE, 61), split(FOUR, 60, prefill_ts=9000, n_sum=96, sum_us=13), gpus=FOUR),
    told(split(ONE, 61), split(TWO, 63, prefill_ts=200, n_sum=96, sum_us=13)),
    told(split(ONE, 61)),
    told(split(TWO, 84, n_sum=64, sum_us=13), split(ONE, 61), gpus=FOUR),
    told(split(TWO, 40, "layer"), split(("cuda:1",), 20)),
    told(split(TWO, 31, n_sum=160, sum_us=14), split(TWO, 17, "layer")),
    told(split(TWO, 197, "layer"), split(TWO, 139, n_sum=60, sum_us=40)),
    told(PAIRS, split(FOUR, 20, n_sum=96, sum_us=400), gpus=FOUR),
    told(split(FOUR, 60, n_sum=96), PAIRS, gpus=FOUR),
    told(split(TWO, 31, n_sum=96, sum_us=14), split(FOUR, 33, n_sum=96, sum_us=20), gpus=FOUR),
    told(split(TWO, 31, n_sum=1), split(FOUR, 20, why=SLOWER, n_sum=9, sum_us=1), gpus=FOUR),
    told(split(FOUR, 50, n_sum=9, sum_us=20), split(TWO, 31, n_sum=9), gpus=(*FOUR, "cuda:4")),
    told(split(ONE, 5, n_cpu_blocks=12), split(("cpu",), 2.14), gpus=ONE),
    told(split(FOUR, 16, n_cpu_moe=19), gpus=FOUR),
    told(split(("cpu",), 2.14), split(ONE, 1, n_cpu_blocks=70), gpus=ONE),
    told(split(("cpu",), 2.14), split(TWO, 1, n_cpu_blocks=70), gpus=TWO),
    told(split(("cpu",), 2.14), gpus=ONE), told(split(("cpu",), 2.14), gpus=FOUR),
    *(
        told(split(ONE, 61), split(TWO, 30, n_sum=1, why=Sentence(why.template, part="47 %")))
        for why in SHORT_REASONS.values()
    ),
)  # fmt: skip
OTHERS = (
    "The pre-tokenizer 'x' is unknown: the default one is used, and answers may be worse.",
    "No pre-tokenizer is named: the default one is used, and answers may be worse.",
    OutOfDeviceMemory("cpu", 9, 9, "to load the model").hint.partition(". ")[2],
    NoDevice("cuda:9", "there is cpu", "pip install x").message,
    NoDevice("cuda:9", "there is cpu", "pip install x").hint,
    KernelError("cuda:0", "x").message,
    *(
        CommError(1, problem, "cuda:1").message
        for problem in (
            "lost the other ranks in the middle of a step", "has ended in the middle of a step",
            "did not answer the other devices in time",
            "has computed other numbers than the others",
        )
    ),
    "it has the tensor 'a', which llama models do not have",
    "it has more in the tensor 'a' than llama models have",
    "it claims to have 9 tensors", "it claims to have 9 metadata entries",
    *(f"{what} claims to be 9 bytes long" for what in ("a metadata key", "a tensor's name")),
    *(f"{what} is not valid UTF-8" for what in ("a metadata key", "a tensor's name")),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _german() -> Iterator[None]:
    use_language("de")
    yield
    use_language("en")


def test_each_form_is_one_that_the_engine_makes() -> None:
    """Or that stands in its source, with a number or a word for what is filled in."""
    made = [*SPEEDS, *OTHERS]
    made += [part for text in REASONS_FOR_CHOICES for part in SENTENCE_END.split(text)]
    made += [text for error in MADE for text in (error.message, error.hint)]
    made += [
        text.replace("{}", value)
        for whole in all_texts()
        for text in (whole, *SENTENCE_END.split(whole))
        for value in ("7", "cpu", "")
    ]
    forms = (*FORMS, *PROBLEM_FORMS)
    unused = [form for form in forms if not any(pattern(form).fullmatch(text) for text in made)]
    assert unused == []


def test_sentences_of_errors_that_stay_english_are_listed() -> None:
    """A new error needs a form in `app/core/engine_sentences`, or a line in the list."""
    listed = LISTED.read_text("utf-8").splitlines()
    new = sorted(set(untranslated()) - set(listed))
    gone = sorted(set(listed) - set(untranslated()))
    help_ = "give them a form, or run `python -m tests.helpers.engine_errors`"
    assert not new, f"{help_}: {new}"
    assert not gone, f"{help_}: {gone}"


@pytest.mark.parametrize("text", REASONS_FOR_CHOICES)
def test_why_a_split_was_chosen_is_said_in_german(text: str) -> None:
    said = translated(text)
    left = r"(?i)\b(the|alone|split|over|and|only|each|no|with|is|has|gain|GPUs? alone|because)\b"
    assert re.findall(left, said) == [], said
    numbers = re.findall(r"\d+", text)
    assert sorted(re.findall(r"\d+", said)) == sorted(numbers), said


def test_a_choice_among_gpus_reads_well() -> None:
    assert translated(REASONS_FOR_CHOICES[0]) == (
        "GPU 0 allein: 61 tok/s. Aufgeteilt auf beide: 48, weil jedes Token 96-mal 70 µs auf die"
        " andere GPU wartet."
    )
    assert translated(
        "Split by tensor over GPU 0 and GPU 1: 84 tok/s, GPU 0 alone: 61. Each GPU reads only its"
        " part of the weights, although each token waits 64 times 13 µs for the other GPU."
    ) == (
        "Nach Tensoren aufgeteilt auf GPU 0 und GPU 1: 84 tok/s, GPU 0 allein: 61. Jede GPU liest"
        " nur ihren Teil der Gewichte, auch wenn jedes Token 64-mal 13 µs auf die andere GPU"
        " wartet."
    )


def test_what_is_wrong_with_a_file_is_said_in_german() -> None:
    error = InvalidGGUF("/m/a.gguf", "the file is truncated: 5 of 9 bytes are missing")
    assert translated(f"{error.message} {error.hint}") == (
        "a.gguf ist keine brauchbare GGUF-Datei: die Datei ist abgeschnitten: 5 von 9 Bytes"
        " fehlen. Laden Sie die Datei noch einmal herunter, oder wählen Sie eine andere."
    )
    full = "/p/My. Plans/a.json cannot be written: No space left on device."
    assert translated(full).endswith("Auf dem Laufwerk ist kein Platz mehr.")


def test_errors_of_the_system_are_translated() -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/p")
    assert reason_of(error) == "Das Laufwerk ist schreibgeschützt"
    assert reason_of(OSError(99, "Something else")) == "Something else"
    use_language("en")
    assert reason_of(error) == "Read-only file system"
    same = {code for code in errno.errorcode if os.strerror(code) in SYSTEM_FORMS}
    assert len(same) == len(SYSTEM_FORMS) or sys.platform != "linux"


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
