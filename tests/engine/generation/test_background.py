"""While a grammar is checked for one answer, others are computed, and the answer can be ended."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.paths import demo_model
from engine import (
    AnswerRequest,
    Cancelled,
    Failed,
    Finished,
    Grammar,
    GrammarError,
    LoadParams,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from engine.events import Load
from engine.generation.sequence import end_threads
from engine.util.progress import IsCancelled, never
from tests.helpers.desk import Desk

FORM = Grammar("regex", "[0-9]{4}")
PLAIN = AnswerRequest(prompt="A rank", sampling=SamplingParams(temperature=0, max_tokens=4))
FORMED = AnswerRequest(prompt="A rank", sampling=PLAIN.sampling, grammar=FORM)
WAIT_S = 20.0
PATIENCE_S = 4.0
"""Seconds after which a held check fails, so that a test without a second thread ends."""


class HeldCheck:
    """A check of grammars that lasts until it is let go, or cancelled."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.cancelled = (threading.Event() for _ in range(3))
        self.error: GrammarError | None = None

    def __call__(self, grammar: Grammar, is_cancelled: IsCancelled = never) -> None:
        self.begun.set()
        for _ in range(int(PATIENCE_S / 0.005)):
            if is_cancelled():
                self.cancelled.set()
                raise Cancelled("The check")
            if self.may_end.wait(0.005):
                if self.error is not None:
                    raise self.error
                return
        raise GrammarError("Nobody let the check end.")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> HeldCheck:
    held = HeldCheck()
    monkeypatch.setattr("engine.generation.structured_output.check_grammar", held)
    return held


@pytest.fixture(scope="module")
def path() -> Path:
    found = demo_model()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with load_model(path, n_ctx=256, parallel=2) as loaded:
        yield loaded


@pytest.fixture
def desk(path: Path) -> Iterator[Desk]:
    found = Desk()
    found.run(Load(LoadParams(str(path), n_ctx=256)))
    yield found
    assert found.host.close(WAIT_S)


def reason(event: object) -> str:
    assert isinstance(event, Finished), event
    return event.reason


def test_others_are_answered_while_a_grammar_is_checked(desk: Desk, check: HeldCheck) -> None:
    formed = desk.host.submit(FORMED)
    assert check.begun.wait(WAIT_S)
    assert reason(desk.run(PLAIN)) == "length"
    check.may_end.set()
    assert reason(desk.closing(formed)) == "stop"


def test_a_refusal_comes_when_the_check_has_ended(desk: Desk, check: HeldCheck) -> None:
    check.error = GrammarError("It is no grammar.")
    formed = desk.host.submit(FORMED)
    assert reason(desk.run(PLAIN)) == "length"
    check.may_end.set()
    failed = desk.closing(formed)
    assert isinstance(failed, Failed)
    assert failed.error.message == "It is no grammar."


@pytest.mark.parametrize("ending", ["cancel", "close"])
def test_a_check_ends_with_its_answer(desk: Desk, check: HeldCheck, ending: str) -> None:
    formed = desk.host.submit(FORMED)
    assert check.begun.wait(WAIT_S)
    if ending == "cancel":
        desk.host.cancel(formed)
    else:
        assert desk.host.close(WAIT_S)
    assert reason(desk.closing(formed)) == "cancelled"
    assert check.cancelled.wait(WAIT_S)


def test_an_engine_that_waits_for_a_check_computes_nothing(
    desk: Desk, check: HeldCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_steps, step = [0], Model.step

    def count(model: Model) -> None:
        n_steps[0] += 1
        step(model)

    monkeypatch.setattr(Model, "step", count)
    formed = desk.host.submit(FORMED)
    assert check.begun.wait(WAIT_S)
    assert not check.may_end.wait(0.2)
    assert n_steps[0] < 5
    check.may_end.set()
    assert reason(desk.closing(formed)) == "stop"


def test_a_thread_reads_one_answer_while_another_is_prepared(
    model: Model, check: HeldCheck
) -> None:
    formed = model.answer(FORMED)
    assert formed.ready() == []
    model.step()
    assert check.begun.wait(WAIT_S)
    assert reason(list(model.answer(PLAIN))[-1]) == "length"
    check.may_end.set()
    assert reason(list(formed)[-1]) == "stop"


def test_an_answer_is_the_same_beside_one_that_is_prepared(model: Model, check: HeldCheck) -> None:
    alone = [event for event in model.answer(PLAIN) if isinstance(event, TokenText)]
    formed = model.answer(FORMED)
    assert formed.ready() == []
    beside = [event for event in model.answer(PLAIN) if isinstance(event, TokenText)]
    assert beside == alone
    formed.close()
    model.step()
    assert check.cancelled.wait(WAIT_S)


def test_a_reader_can_cancel_a_check(model: Model, check: HeldCheck) -> None:
    events = list(model.answer(FORMED, check.begun.is_set))
    assert reason(events[-1]) == "cancelled"
    assert check.cancelled.wait(WAIT_S)


def test_an_interrupted_reader_ends_the_check(model: Model, check: HeldCheck) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    formed = model.answer(FORMED, wake=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        next(formed)
    assert check.cancelled.wait(WAIT_S)


def test_the_end_of_the_program_waits_for_what_it_cancels(model: Model, check: HeldCheck) -> None:
    """A thread that compiles a grammar when Python has ended would crash."""
    formed = model.answer(FORMED)
    assert formed.ready() == []
    model.step()
    assert check.begun.wait(WAIT_S)
    end_threads()
    assert check.cancelled.is_set()
    assert "tandem-background" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(Cancelled):
        next(formed)
