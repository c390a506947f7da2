"""Several answers run at once: each has its own text, end and figures."""

from collections.abc import Iterator

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.core.engine_client import AnswerStage, EngineClient, EngineState, RunningAnswer
from engine import (
    AnswerRequest,
    ChatMessage,
    EngineCrashed,
    EngineError,
    Event,
    Failed,
    Finished,
    Load,
    LoadParams,
    PrefillProgress,
    Resplit,
    SaveState,
    TokenText,
    Unload,
)
from tests.helpers.fake_host import FakeHost, Script

PARAMS = LoadParams("/models/tiny.gguf")


@pytest.fixture
def client(qtbot: QtBot, script: Script) -> Iterator[EngineClient]:
    parent = QObject()
    made = EngineClient(lambda on_event: FakeHost(on_event, script), parent)
    with qtbot.waitSignal(made.loaded):
        made.load(PARAMS)
    yield made
    made.shutdown()


def host_of(client: EngineClient) -> FakeHost:
    assert isinstance(client._host, FakeHost)
    return client._host


def ask(client: EngineClient, text: str) -> RunningAnswer:
    return client.generate(AnswerRequest((ChatMessage("user", text),)))


class Ear:
    """What a client has told of its answers, by their numbers."""

    def __init__(self, client: EngineClient) -> None:
        self.texts: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        client.text.connect(self._on_text)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)

    def _on_text(self, text: str, answer: RunningAnswer) -> None:
        self.texts[answer.number] = self.texts.get(answer.number, "") + text

    def _on_finished(self, finished: Finished, answer: RunningAnswer) -> None:
        self.ends[answer.number] = finished.reason

    def _on_failed(self, error: EngineError, answer: RunningAnswer) -> None:
        self.ends[answer.number] = error.message


@pytest.fixture
def ear(client: EngineClient) -> Ear:
    return Ear(client)


def send(client: EngineClient, answer: RunningAnswer, event: Event) -> None:
    host_of(client).send(answer.number, event)


def held(script: Script, *texts: str) -> list[Script]:
    """Have the answers to these messages stop after two pieces, until they are let go."""
    made = [Script(answer=f"{text} has an answer.", hold=True, hold_after=2) for text in texts]
    script.others |= dict(zip(texts, made, strict=True))
    return made


def test_each_answer_has_its_text_and_its_end(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    names = [f"Question {n}" for n in range(8)]
    for n, name in enumerate(names):
        script.others[name] = Script(answer=f"{name}: " + "abc" * (5 * n), pause_s=0.002 * n)
    answers = [ask(client, name) for name in names]
    assert client.state is EngineState.GENERATING
    assert len(client.answers) == 8
    qtbot.waitUntil(lambda: len(ear.ends) == 8)
    assert client.state is EngineState.READY
    for answer, name in zip(answers, names, strict=True):
        assert ear.texts[answer.number] == script.others[name].answer
        n_pieces = -(-len(script.others[name].answer) // 4)
        assert answer.meter.n_tokens == len(answer.ids) == n_pieces
    assert set(ear.ends.values()) == {"stop"}
    assert not any(answer.was_alone for answer in answers)


def test_text_of_interleaved_answers_is_joined_for_each(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    held(script, "A", "B")
    first, second = ask(client, "A"), ask(client, "B")
    qtbot.waitUntil(lambda: len(ear.texts) == 2)
    ear.texts.clear()
    n_signals = list[str]()
    client.text.connect(lambda text, _: n_signals.append(text))
    client._inbox._timer.stop()
    for n in range(100):
        send(client, first, TokenText("a", (n,)))
        send(client, second, TokenText("b", (n,)))
    client._inbox.drain()
    assert ear.texts[first.number].count("a") == ear.texts[second.number].count("b") == 100
    assert len(n_signals) < 10, "many tokens are told together"
    client.start()


def test_one_is_stopped_and_the_others_go_on(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    scripts = held(script, "A", "B", "C")
    answers = [ask(client, name) for name in "ABC"]
    qtbot.waitUntil(lambda: len(ear.texts) == 3)
    client.stop(answers[1])
    qtbot.waitUntil(lambda: bool(ear.ends))
    assert ear.ends == {answers[1].number: "cancelled"}
    assert client.state is EngineState.GENERATING
    host_of(client).let_go(*scripts)
    qtbot.waitUntil(lambda: len(ear.ends) == 3)
    assert ear.ends[answers[0].number] == ear.ends[answers[2].number] == "stop"
    client.stop(answers[0])  # which has ended: nothing happens


def test_an_error_of_one_leaves_the_others_alone(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    (script_a,) = held(script, "A")
    script.others["B"] = Script(answer_error=EngineError("The template refuses it."))
    first, second = ask(client, "A"), ask(client, "B")
    qtbot.waitUntil(lambda: second.number in ear.ends)
    assert ear.ends == {second.number: "The template refuses it."}
    assert client.state is EngineState.GENERATING
    assert client.model is not None
    host_of(client).let_go(script_a)
    qtbot.waitUntil(lambda: first.number in ear.ends)
    assert ear.ends[first.number] == "stop"


def test_an_answer_waits_reads_and_writes(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    script.n_at_once = 1
    held(script, "A")
    first, second = ask(client, "A"), ask(client, "B")
    qtbot.waitUntil(lambda: first.stage is AnswerStage.WRITING)
    assert second.stage is AnswerStage.WAITING
    with qtbot.waitSignal(client.prefill) as told:
        send(client, second, PrefillProgress(300, 1000))
    assert told.args == [300, 1000, second]
    assert (second.stage, second.n_read, second.n_prompt) == (AnswerStage.READING, 300, 1000)
    client.stop(first)
    with qtbot.waitSignal(client.text, check_params_cb=lambda _, answer: answer is second):
        pass
    assert second.stage is AnswerStage.WRITING


def test_rates_are_those_of_each_and_of_all_together(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    for name, pause_s in (("A", 0.01), ("B", 0.02)):
        script.others[name] = Script(answer="x" * 2000, chunk=1, pause_s=pause_s)
    first, second = ask(client, "A"), ask(client, "B")
    rates: list[tuple[float, int]] = []
    client.rate.connect(lambda *told: rates.append(told))
    paced: set[int] = set()
    client.paced.connect(lambda answer: paced.add(answer.number))
    qtbot.waitUntil(lambda: bool(rates) and len(paced) == 2, timeout=10_000)
    total, n_answers = rates[-1]
    assert n_answers == 2
    assert 10 < second.tokens_per_s < first.tokens_per_s < 110
    assert total > first.tokens_per_s
    client.stop(first)
    client.stop(second)
    qtbot.waitUntil(lambda: client.state is EngineState.READY)
    assert rates[-1] == (0.0, 0)


@pytest.mark.parametrize("how", ["load", "unload", "tune"])
def test_what_takes_the_model_away_ends_all_answers_but_no_saving(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear, how: str
) -> None:
    held(script, "A", "B")
    answers = [ask(client, name) for name in "AB"]
    qtbot.waitUntil(lambda: len(ear.texts) == 2)
    client.save_state("/chats/1.state")
    done = {"load": client.loaded, "unload": client.unloaded, "tune": client.tuned}[how]
    with qtbot.waitSignals([client.state_saved, done]):
        if how == "unload":
            client.unload()
        else:
            {"load": client.load, "tune": client.tune}[how](PARAMS)
    assert ear.ends == dict.fromkeys([answer.number for answer in answers], "cancelled")


def test_a_split_is_changed_under_two_answers_and_its_cancel_ends_none(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    scripts = held(script, "A", "B")
    answers = [ask(client, name) for name in "AB"]
    qtbot.waitUntil(lambda: len(ear.texts) == 2)
    split = LoadParams(PARAMS.path, ("cpu", "cpu"), (3, 1))
    with qtbot.waitSignal(client.resplit_done):
        client.resplit(split)
    assert client.state is EngineState.GENERATING
    script.hold = True
    client.resplit(PARAMS)
    assert client.state is EngineState.LOADING
    with qtbot.waitSignal(client.resplit_failed):
        client.cancel()
    assert client.state is EngineState.GENERATING
    assert ear.ends == {}
    assert client.model is not None
    assert client.model.params == split
    host_of(client).let_go(*scripts)
    qtbot.waitUntil(lambda: len(ear.ends) == 2)
    assert set(ear.ends.values()) == {"stop"}
    assert {answer.number for answer in answers} == set(ear.ends)


def test_a_lost_engine_ends_all_and_the_loss_is_told_once(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    """Its process fails all that is unanswered, and says once that the model is gone."""
    held(script, "A", "B", "C")
    answers = [ask(client, name) for name in "ABC"]
    qtbot.waitUntil(lambda: len(ear.texts) == 3)
    losses: list[object] = []
    client.lost.connect(lambda *told: losses.append(told))
    crash = EngineCrashed("It died.")
    for answer in answers:
        send(client, answer, Failed(crash, is_model_lost=answer is answers[0]))
    qtbot.waitUntil(lambda: len(ear.ends) == 3)
    assert len(losses) == 1
    assert client.model is None
    assert client.state is EngineState.EMPTY


def test_something_aside_is_ended_alone(
    qtbot: QtBot, client: EngineClient, script: Script, ear: Ear
) -> None:
    held(script, "title", "A")
    reasons: list[str] = []
    ask_title = AnswerRequest((ChatMessage("user", "title"),))
    assert client.ask_aside(ask_title, lambda one: reasons.append(one.reason))
    first = ask(client, "A")
    qtbot.waitUntil(lambda: bool(reasons) and bool(ear.texts))
    assert reasons == ["cancelled"]
    assert ear.ends == {}
    assert not client.ask_aside(ask_title, lambda _: None)
    client.stop(first)
    kinds = [type(command) for command in host_of(client).commands]
    assert not set(kinds) & {Unload, Resplit, SaveState}
    assert kinds[0] is Load
