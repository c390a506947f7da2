"""Events from another thread become signals of this one, in order and few."""

import threading
from collections.abc import Iterator

import pytest
from PySide6.QtCore import QObject, QThread
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineClient, EngineState, RunningAnswer
from engine import (
    AnswerRequest,
    Cancelled,
    ChatMessage,
    ContextShifted,
    EngineCrashed,
    EngineError,
    Event,
    Failed,
    Finished,
    Load,
    LoadParams,
    LoadState,
    ModelResplit,
    PrefillProgress,
    RankTimes,
    Resplit,
    StateFileError,
    StateLoaded,
    StateSaved,
    TokenText,
    TokenTimes,
    Tune,
    TuneEstimate,
    TuneProgress,
    TuneResult,
)
from tests.helpers.fake_host import FakeHost, Script, model_loaded

PARAMS = LoadParams("/models/tiny.gguf")
ASK = (ChatMessage("user", "Hi"),)


@pytest.fixture
def parent() -> QObject:
    return QObject()


@pytest.fixture
def client(qtbot: QtBot, parent: QObject, script: Script) -> Iterator[EngineClient]:
    made = EngineClient(lambda on_event: FakeHost(on_event, script), parent)
    made.start()
    yield made
    made.shutdown()


def loaded(qtbot: QtBot, client: EngineClient) -> EngineClient:
    with qtbot.waitSignal(client.loaded):
        client.load(PARAMS)
    return client


def generate(client: EngineClient, text: str = "Hi") -> RunningAnswer:
    return client.generate(AnswerRequest((ChatMessage("user", text),)))


def stop_all(client: EngineClient) -> None:
    for answer in client.answers:
        client.stop(answer)


def test_the_states_follow_the_work(qtbot: QtBot, client: EngineClient) -> None:
    seen: list[EngineState] = []
    client.state_changed.connect(seen.append)
    loaded(qtbot, client)
    with qtbot.waitSignal(client.finished):
        generate(client)
    with qtbot.waitSignal(client.unloaded):
        client.unload()
    assert [state.value for state in seen] == ["loading", "ready", "generating", "ready", "empty"]
    assert client.model is None


def test_tokens_arrive_whole_in_order_and_joined(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    script.answer, script.chunk = "".join(chr(65 + n % 26) for n in range(5000)), 1
    texts: list[str] = []
    loaded(qtbot, client).text.connect(lambda text, _: texts.append(text))
    with qtbot.waitSignal(client.finished, timeout=10_000):
        generate(client)
    assert "".join(texts) == script.answer
    assert len(texts) < 500


def test_signals_come_on_the_gui_thread(qtbot: QtBot, client: EngineClient) -> None:
    threads: list[QThread] = []
    loaded(qtbot, client).text.connect(lambda _: threads.append(QThread.currentThread()))
    with qtbot.waitSignal(client.finished):
        generate(client)
    assert set(map(id, threads)) == {id(client.thread())}


def test_progress_of_prompt_and_shift_is_told(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    script.extra = [PrefillProgress(3, 9), ContextShifted(40)]
    steps: list[tuple[int, int]] = []
    loaded(qtbot, client).prefill.connect(lambda done, total, _: steps.append((done, total)))
    with qtbot.waitSignals([client.shifted, client.finished]):
        generate(client)
    assert steps == [(3, 9)]


def test_a_cancelled_load_fails_as_cancelled_and_keeps_the_model(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    loaded(qtbot, client)
    script.hold = True
    client.load(LoadParams("/models/other.gguf"))
    with qtbot.waitSignal(client.load_failed) as failed:
        client.cancel()
    assert isinstance(failed.args[0], Cancelled)
    assert client.model is not None
    assert client.model.info.path == PARAMS.path
    assert client.state is EngineState.READY


def test_a_model_that_made_room_in_vain_is_gone(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    loaded(qtbot, client)
    script.load_error, script.loses_model = EngineError("Too large."), True
    with qtbot.waitSignal(client.load_failed):
        client.load(LoadParams("/models/other.gguf"))
    assert client.model is None
    assert client.state is EngineState.EMPTY


@pytest.mark.parametrize(
    ("late", "left"),
    [
        (model_loaded(LoadParams("/models/second.gguf")), "/models/second.gguf"),
        (Failed(Cancelled("Loading"), is_model_lost=True), None),
        (Failed(Cancelled("Loading")), PARAMS.path),
    ],
)
def test_what_a_replaced_load_left_behind_is_known(
    qtbot: QtBot, client: EngineClient, script: Script, late: Event, left: str | None
) -> None:
    """The first load ends just as the second one is requested, and the second one fails."""
    loaded(qtbot, client)
    script.hold = True
    client.load(LoadParams("/models/third.gguf"))
    client._host.send(1, late)  # type: ignore[union-attr]
    with qtbot.waitSignal(client.load_failed):
        client.cancel()
    assert (client.model.info.path if client.model else None) == left


def test_a_death_told_behind_the_next_load_does_not_end_that(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    """It was on its way when somebody asked for the load, which another process does."""
    loaded(qtbot, client)
    failures: list[object] = []
    client.load_failed.connect(failures.append)
    script.pause_s = 0.05
    client.load(LoadParams("/models/second.gguf"))
    with qtbot.waitSignal(client.lost):
        client._host.send(0, Failed(EngineCrashed("It died."), is_model_lost=True))  # type: ignore[union-attr]
    assert client.state is EngineState.LOADING
    with qtbot.waitSignal(client.loaded):
        pass
    assert client.model is not None
    assert client.model.info.path == "/models/second.gguf"
    assert failures == []


SPLIT = LoadParams(PARAMS.path, ("cpu", "cpu"), (3, 1))


def test_a_model_is_there_while_it_is_split_anew(qtbot: QtBot, client: EngineClient) -> None:
    seen: list[tuple[str, bool]] = []
    progress: list[float] = []
    loaded(qtbot, client)
    client.state_changed.connect(lambda state: seen.append((state.value, bool(client.model))))
    client.load_progress.connect(progress.append)
    with qtbot.waitSignal(client.resplit_done) as done:
        client.resplit(SPLIT)
    assert seen == [("loading", True), ("ready", True)]
    assert progress
    assert client.model is not None
    assert client.model is done.args[0].model
    assert client.model.params == SPLIT


def test_an_answer_goes_on_over_a_resplit(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    """The answer is not cancelled, and the events of both may come in any order."""
    loaded(qtbot, client)
    script.hold, script.hold_after = True, 1
    generate(client)
    qtbot.waitUntil(lambda: client.state is EngineState.GENERATING)
    client.resplit(SPLIT)
    (number,) = client._work.stoppable
    assert client.state is EngineState.LOADING
    with qtbot.waitSignal(client.resplit_done):
        client._host.send(number, ModelResplit(model_loaded(SPLIT), 5))  # type: ignore[union-attr]
    assert client.state is EngineState.GENERATING
    assert client.model is not None
    assert client.model.params == SPLIT
    with qtbot.waitSignal(client.finished):
        stop_all(client)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failed_resplit_keeps_the_model_unless_it_is_lost(
    qtbot: QtBot, client: EngineClient, script: Script, is_lost: bool
) -> None:
    loaded(qtbot, client)
    script.load_error, script.loses_model = EngineError("Too large."), is_lost
    with qtbot.waitSignal(client.resplit_failed) as failed:
        client.resplit(SPLIT)
    assert str(failed.args[0]) == "Too large."
    assert (client.model is None) == is_lost
    assert client.state is (EngineState.EMPTY if is_lost else EngineState.READY)
    if client.model:
        assert client.model.params == PARAMS


def test_the_last_of_several_resplits_is_told(qtbot: QtBot, client: EngineClient) -> None:
    loaded(qtbot, client)
    done: list[object] = []
    client.resplit_done.connect(done.append)
    client.resplit(LoadParams(PARAMS.path, ("cpu",) * 3))
    with qtbot.waitSignal(client.resplit_done):
        client.resplit(SPLIT)
    assert len(done) == 1
    assert client.model is not None
    assert client.model.params == SPLIT
    assert [type(c) for c in client._host.commands] == [Load, Resplit, Resplit]  # type: ignore[union-attr]


def test_states_are_saved_and_loaded(qtbot: QtBot, client: EngineClient, script: Script) -> None:
    loaded(qtbot, client)
    progress: list[float] = []
    client.state_progress.connect(progress.append)
    told: list[StateSaved | StateLoaded] = []
    client.state_saved.connect(told.append)
    client.state_loaded.connect(told.append)
    client.save_state("/chats/1.state")
    client.load_state("/chats/2.state")
    qtbot.waitUntil(lambda: len(told) == 2)
    assert told == [
        StateSaved("/chats/1.state", 20, 4096), StateLoaded("/chats/2.state", (1, 2, 3)),
    ]  # fmt: skip
    assert progress == [0.5, 0.5]
    assert client.state is EngineState.READY
    script.state_error = StateFileError("/chats/2.state", "It is damaged.")
    with qtbot.waitSignal(client.state_failed) as failed:
        client.load_state("/chats/2.state")
    error, command = failed.args  # type: ignore[misc]
    assert error.path == "/chats/2.state"
    assert command == LoadState("/chats/2.state")


def test_a_search_tells_its_steps_and_leaves_the_model(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    loaded(qtbot, client)
    before, seen = client.model, list[object]()
    for signal in (client.tune_started, client.tune_progress):
        signal.connect(seen.append)
    states: list[EngineState] = []
    client.state_changed.connect(states.append)
    params = LoadParams("/models/tiny.gguf", ("cuda:0", "cuda:1"))
    with qtbot.waitSignal(client.tuned) as caught:
        client.tune(params, "prompts", 30)
    assert client._host.commands[-1] == Tune(params, "prompts", 30, with_drafts=True)  # type: ignore[union-attr]
    assert states == [EngineState.LOADING, EngineState.READY]
    assert [type(event) for event in seen] == [TuneEstimate, *[TuneProgress] * 3]
    (result,) = caught.args  # type: ignore[misc]
    assert isinstance(result, TuneResult)
    assert len(result.trials) == 3
    assert result.winner is not None
    assert client.model == before
    script.hold, script.hold_after = True, 1
    with qtbot.waitSignal(client.tune_progress):
        client.tune(params)
    with qtbot.waitSignal(client.tuned) as caught:
        client.cancel()
    assert not caught.args[0].is_complete  # type: ignore[index]


def test_a_search_that_fails_may_lose_the_model(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    loaded(qtbot, client)
    for loses in (False, True):
        script.tune_error, script.loses_model = EngineError("No."), loses
        with qtbot.waitSignal(client.tune_failed):
            client.tune(PARAMS)
        assert (client.model is None) == loses
    assert client.state is EngineState.EMPTY


def test_times_of_tokens_are_told(qtbot: QtBot, client: EngineClient, script: Script) -> None:
    times = TokenTimes(7, 0.02, (RankTimes(0.01, 0.005),))
    script.extra = [times]
    loaded(qtbot, client)
    with qtbot.waitSignal(client.token_times) as caught:
        generate(client)
    assert caught.args == [times]


def test_the_timer_sleeps_when_nothing_happens_and_wakes_again(
    qtbot: QtBot, client: EngineClient
) -> None:
    loaded(qtbot, client)
    qtbot.waitUntil(lambda: not client._inbox._timer.isActive())
    with qtbot.waitSignal(client.finished):
        generate(client)


def test_the_rate_is_told_while_tokens_come(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    script.answer, script.chunk, script.pause_s = "x" * 160, 1, 0.01
    rates: list[float] = []
    loaded(qtbot, client).rate.connect(lambda rate, _: rates.append(rate))
    with qtbot.waitSignal(client.finished, timeout=10_000):
        generate(client)
    assert rates[-1] == 0.0
    assert all(10 < rate <= 110 for rate in rates[:-1])


def test_shutdown_delivers_the_last_words(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    ends: list[Finished] = []
    texts: list[str] = []
    loaded(qtbot, client).finished.connect(lambda finished, _: ends.append(finished))
    script.hold, script.hold_after = True, 2
    client.text.connect(lambda text, _: texts.append(text))
    generate(client)
    qtbot.waitUntil(lambda: bool(texts))
    assert client.shutdown()
    assert [end.reason for end in ends] == ["cancelled"]
    assert not any(thread.name == "fake-engine" for thread in threading.enumerate())
    client._host.send(1, TokenText("late", (1,)))  # type: ignore[union-attr]
    assert client.state is EngineState.CLOSED


def test_a_released_engine_is_replaced_and_its_events_are_dropped(
    qtbot: QtBot, client: EngineClient
) -> None:
    loaded(qtbot, client)
    with qtbot.waitSignal(client.unloaded):
        client.unload()
    client.count(ASK, "")
    host = client.release()
    assert isinstance(host, FakeHost)
    assert host.close()
    states: list[object] = []
    client.state_changed.connect(states.append)
    host.send(0, Failed(EngineError("Too late.", "")))
    qtbot.wait(60)
    assert states == []
    with qtbot.waitSignal(client.ready):
        client.start()
    loaded(qtbot, client)
    assert client._host is not host
    assert client.state is EngineState.READY


def test_what_waits_for_a_released_engine_is_told(qtbot: QtBot, client: EngineClient) -> None:
    loaded(qtbot, client)
    counted: list[object] = []
    client.counted.connect(counted.append)
    answers: list[str] = []
    assert client.ask_aside(AnswerRequest(ASK), lambda answer: answers.append(answer.reason))
    client.count(ASK, "")
    host = client.release()
    assert host is not None
    assert host.close()
    assert counted == [None]
    assert answers == ["failed"]
