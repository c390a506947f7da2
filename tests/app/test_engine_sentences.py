"""The engine's commonest sentences, in German."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from app.engine_sentences import FORMS, _pattern, translated
from app.notice import Notice
from app.server.web.running import _not_listening
from app.translation import use_language
from engine import EngineError
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
SPEEDS = (
    *(reason.format(part="47 %") for reason in REASONS.values()),
    "GPU 2 is slower; the other waits for it 32 % of the time.",
    "CPU 1 is slowest; the others wait for it 32 % of the time.",
    told(split(ONE, 9.14), gpus=ONE), told(split(("cpu",), 2.14), gpus=()),
    told(split(ONE, 9.14), gpus=TWO), reason_for_choice(None, (), ()),
    *reason_for_machines(BOTH, ALONE, ALONE).replace(". ", ".|").split("|"),
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
    assert translated("The CPU alone, as there is no GPU: 2.1 tok/s.") == (
        "Nur die CPU, denn es gibt keine GPU: 2,1 tok/s."
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


def test_sentences_that_are_not_known_stay() -> None:
    text = "Something else has happened. Put all parts into one folder."
    assert translated(text) == (
        "Something else has happened. Legen Sie alle Teile in einen Ordner."
    )
    use_language("en")
    assert translated(text) == text
