"""Hostile GGUF files, generated and kept: each ends in an answer or in a sentence."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the fuzzer measures memory as Linux does", allow_module_level=True)

from engine import EngineError
from tests.fuzz import gguf_targets, gguf_worker
from tests.fuzz.gguf_cases import SHARES, Case, make_case
from tests.fuzz.gguf_fuzzer import fuzz, save
from tests.fuzz.gguf_outcomes import Finding, Tally
from tests.fuzz.gguf_worker import execute
from tests.helpers.doomed_worker import end_at_three

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.gguf"))
"""Files that once ended in something else."""

EXECUTIONS = 2000


def outcome(target: str, data: bytes, folder: Path, draw: int = 0) -> Finding | None:
    """Return what is wrong with the outcome of a file."""
    return execute(Case(target, {"m.gguf": (data, 0)}, "m.gguf", draw), 0, folder, Tally())


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")  # loads choose others, which is undone here


def test_generated_files_end_in_an_answer_or_a_sentence() -> None:
    run = fuzz(range(EXECUTIONS), seed=17, with_references=False)
    assert not run.findings, "\n\n".join(f"{f.number}: {f.details}" for f in run.findings)
    assert run.count == EXECUTIONS
    for target, share in SHARES.items():
        tally = run.tallies[target]
        assert tally.count > EXECUTIONS * share / 100 / 2
        assert 0.1 < tally.accepted / tally.count < 0.9  # neither all sound nor all broken


@pytest.mark.parametrize("target", SHARES)
@pytest.mark.parametrize("file", CORPUS, ids=lambda path: path.stem)
def test_files_of_the_corpus_end_in_an_answer_or_a_sentence(
    file: Path, target: str, tmp_path: Path
) -> None:
    for draw in range(4):
        found = outcome(target, file.read_bytes(), tmp_path, draw)
        assert found is None, found.details


def test_a_case_follows_from_seed_and_number() -> None:
    cases = [make_case(3, number, with_references=False) for number in range(200)]
    again = [make_case(3, number, with_references=False) for number in range(200)]
    assert cases == again
    assert len({str(case.files) for case in cases}) > 195
    assert cases[:20] != [make_case(4, number, with_references=False) for number in range(20)]


def raising(error: BaseException) -> Callable[[Path, int], None]:
    def target(path: Path, draw: int) -> None:
        raise error

    return target


def filling(path: Path, draw: int) -> None:
    bytearray(400 << 20)[:: 1 << 12] = bytes(400 << 8)


def busy(path: Path, draw: int) -> None:
    started = time.process_time()
    while time.process_time() - started < 0.1:
        pass


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (raising(KeyError("a")), "KeyError in test_gguf_fuzzer.py target"),
        (raising(MemoryError()), "MemoryError in test_gguf_fuzzer.py target"),
        (raising(BaseException("panic")), "BaseException in test_gguf_fuzzer.py target"),
        (raising(EngineError("One.\nTwo.")), "EngineError: a sentence with control characters"),
        (raising(EngineError("Red: \x1b[31m.")), "EngineError: a sentence with control characters"),
        (raising(EngineError("It.", "x" * 501)), "EngineError: a sentence of 501 characters"),
        (filling, "memory of header"),
        (busy, "slow header"),
    ],
    ids=["KeyError", "MemoryError", "panic", "two lines", "escape", "long", "memory", "slow"],
)
def test_a_wrong_outcome_is_a_finding(
    target: Callable[[Path, int], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_targets.TARGETS, "header", target)
    monkeypatch.setitem(gguf_worker.SECONDS, "header", 0.05)
    found = outcome("header", b"GGUF", tmp_path)
    assert found is not None
    assert found.kind.startswith(kind)


def test_an_answer_and_a_sentence_are_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (raising(EngineError("It is broken.", "Pick another one.")), lambda *_: None):
        monkeypatch.setitem(gguf_targets.TARGETS, "header", target)
        assert outcome("header", b"GGUF", tmp_path) is None


def test_a_crash_and_a_hang_are_findings_and_the_run_goes_on() -> None:
    run = fuzz(range(8), seed=0, with_references=False, execute=end_at_three, hang_s=1)
    targets = [make_case(0, number, with_references=False).target for number in (3, 5)]
    assert [(f.number, f.target) for f in run.findings] == [(3, targets[0]), (5, targets[1])]
    assert "SIGSEGV" in run.findings[0].kind
    assert "SIGABRT" in run.findings[1].kind
    assert run.count == 2  # numbers 6 and 7


def test_the_files_of_a_finding_are_saved(tmp_path: Path) -> None:
    place = save(Finding(5, "header", "odd", "details"), 1, False, tmp_path)
    case = make_case(1, 5, with_references=False)
    data, hole = case.files[case.first]
    assert (place / case.first).read_bytes() == data + bytes(hole)
    assert "odd" in (place / "finding.txt").read_text()
