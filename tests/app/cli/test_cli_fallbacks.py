"""Commands that compute say what made a GPU slower: forced here, as the CPU has no fallbacks."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import DeviceSpeed, EngineError, Fallback, Model
from tests.helpers.command_line import GREEDY, Run

SPEED = DeviceSpeed("cpu", 2, bytes_per_s=4e10, f32_flop_per_s=1e11, bf16_flop_per_s=5e11)
BENCH = ("-p", "0", "-n", "2,3", "-r", "1", "--threads", 1)
GRAPH = Fallback("graph", ("cuda:0",), "no kernel can read this cache")
DRAWN = Fallback("sampling", ("cuda:0",), "top-k is too large", "Lower it.")
FIELDS = [
    {"kind": f.kind, "devices": ["cuda:0"], "why": f.why, "help": f.help, "sentence": f.sentence}
    for f in (GRAPH, DRAWN)
]

Fall = Callable[[int, Fallback], None]


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the machine, which takes a second."""
    monkeypatch.setattr("engine.measure_device", lambda device: SPEED)


@pytest.fixture
def fall(monkeypatch: pytest.MonkeyPatch) -> Fall:
    """Return a function that has models fall back when the nth test or answer begins; 0: loaded."""
    wanted: list[tuple[int, Fallback]] = []
    make, bench, generate, answer = Model.__init__, Model.bench, Model.generate, Model.answer
    n = [0]

    def report(model: Model) -> None:
        for at, f in wanted:
            if at == n[0]:
                model.runtime.fallbacks.report(f.kind, f.devices, f.why, f.help)
        n[0] += 1

    def made(model: Model, *args: object, **options: object) -> None:
        n[0] = 0
        make(model, *args, **options)  # type: ignore[arg-type]
        report(model)

    def benched(model: Model, *args: object, **options: object) -> object:
        report(model)
        return bench(model, *args, **options)  # type: ignore[arg-type]

    def generated(model: Model, *args: object, **options: object) -> object:
        report(model)
        return generate(model, *args, **options)  # type: ignore[arg-type]

    def answered(model: Model, *args: object) -> object:
        report(model)
        return answer(model, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "__init__", made)
    monkeypatch.setattr(Model, "bench", benched)
    monkeypatch.setattr(Model, "generate", generated)
    monkeypatch.setattr(Model, "answer", answered)
    return lambda at, fallback: wanted.append((at, fallback))


def test_rows_with_a_fallback_have_a_column_and_reasons(run: Run, model: Path, fall: Fall) -> None:
    """The second test is the first one that falls back."""
    fall(2, GRAPH)
    fall(2, DRAWN)
    lines = run("bench", model, *BENCH).out.splitlines()
    (header,) = [line for line in lines if line.startswith("DEVICES")]
    assert header.split()[-2:] == ["FALLBACK", "REACHED"]
    first, second = lines[lines.index(header) + 1 :][:2]
    at = header.index("FALLBACK")
    assert first[at:].startswith("-  ")
    assert second[at:].startswith("graph, sampling  ")
    assert lines[-4:] == ["", "Slower than possible:", GRAPH.sentence, DRAWN.sentence]


def test_without_a_fallback_there_is_no_column(run: Run, model: Path) -> None:
    out = run("bench", model, *BENCH).out
    assert "FALLBACK" not in out
    assert "Slower" not in out


def test_programs_get_each_rows_fallbacks(run: Run, model: Path, fall: Fall) -> None:
    fall(0, GRAPH)
    fall(2, DRAWN)
    results = run("bench", model, *BENCH, "--json").document["results"]
    assert [line["fallbacks"] for line in results] == [FIELDS[:1], FIELDS]
    rows = list(csv.DictReader(run("bench", model, *BENCH, "--csv").out.splitlines()))
    assert [row["fallbacks"] for row in rows] == ["graph", "graph,sampling"]


def test_a_row_that_fails_has_them_too(
    run: Run, model: Path, fall: Fall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EngineError("It snows.")

    fall(0, GRAPH)
    monkeypatch.setattr(Model, "bench", fail)
    outcome = run("bench", model, "-p", "0", "-n", "3", "--json")
    (line,) = json.loads(outcome.out)["results"]
    assert (line["error"], line["fallbacks"]) == ("It snows.", FIELDS[:1])


def test_a_search_marks_splits_that_fell_back(run: Run, model: Path, fall: Fall) -> None:
    """Its winner may have won because the others were slower than they could be."""
    fall(0, GRAPH)
    search = ("tune", model, "--devices", "cpu", "--ctx", 64, "--threads", 1)
    document = run(*search, "--json").document
    assert document["winner"]["fallbacks"] == FIELDS[:1]
    lines = run(*search, "--last").out.splitlines()
    assert any(line.endswith("fastest, slower than possible") for line in lines)
    at = lines.index("Some were slower than possible:")
    assert lines[at + 1] == GRAPH.sentence


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
def test_other_commands_say_it_when_it_happens(
    run: Run, model: Path, fall: Fall, tmp_path: Path, command: str
) -> None:
    """What is there at the load is told before the answer, the rest behind it; each once."""
    text = tmp_path / "text.txt"
    text.write_text("hello world 12 " * 20, encoding="utf-8")
    arguments = {
        "generate": ("-p", "hello", *GREEDY),
        "chat": GREEDY,
        "perplexity": (text, "--ctx", 16),
    }
    fall(0, GRAPH)
    fall(1, DRAWN)
    outcome = run(command, model, *arguments[command], "--json", stdin="hello\n")
    expected = FIELDS[:1] if command == "perplexity" else FIELDS  # it draws no tokens
    told = [line for line in outcome.err.splitlines() if line.startswith(("On ", "Tokens "))]
    assert told == [f["sentence"] for f in expected]
    document = json.loads(outcome.out)
    found = document["turns"][0] if command == "chat" else document
    assert found["fallbacks"] == expected
