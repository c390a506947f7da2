"""Somebody beside the window who uses its engine: whose events are whose, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineClient
from app.core.engine_client.inbox import EngineSharing
from engine import (
    AnswerRequest,
    CacheCounted,
    ChatMessage,
    Command,
    CountCache,
    EngineCrashed,
    EngineError,
    Failed,
    FallbacksChanged,
    Finished,
    HostEvent,
    LoadParams,
    ModelUnloaded,
    Timings,
    TokenText,
    Usage,
)
from tests.helpers.fake_host import FakeHost, Script, model_loaded

PARAMS = LoadParams("/models/tiny.gguf")
ASK = AnswerRequest((ChatMessage("user", "Hi"),))
END = Finished("stop", Usage(1, 0, 1), Timings(0.1, 0.1))


class Watcher:
    """Somebody who notes all events, and can wait for the end of a command."""

    def __init__(self) -> None:
        self.events: list[HostEvent] = []
        self._came = threading.Condition()

    def __call__(self, event: HostEvent) -> None:
        with self._came:
            self.events.append(event)
            self._came.notify_all()

    def end_of(self, number: int) -> Finished | Failed:
        """Wait for the closing event of an answer."""
        with self._came:
            assert self._came.wait_for(lambda: self._ends(number), 10)
        return self._ends(number)[0]

    def wait_for_text(self) -> None:
        with self._came:
            assert self._came.wait_for(
                lambda: any(isinstance(one.event, TokenText) for one in self.events), 10
            )

    def _ends(self, number: int) -> list[Finished | Failed]:
        mine = [one.event for one in self.events if one.command_id == number]
        return [event for event in mine if isinstance(event, Finished | Failed)]


@pytest.fixture
def parent() -> QObject:
    return QObject()


@pytest.fixture
def client(qtbot: QtBot, parent: QObject, script: Script) -> Iterator[EngineClient]:
    """Yield a client with a loaded model."""
    made = EngineClient(lambda on_event: FakeHost(on_event, script), parent)
    with qtbot.waitSignal(made.loaded):
        made.load(PARAMS)
    yield made
    made.shutdown()


def watched(client: EngineClient) -> Watcher:
    watcher = Watcher()
    client.sharing.watch(watcher)
    return watcher


def test_the_window_does_not_see_what_others_ask(qtbot: QtBot, client: EngineClient) -> None:
    watcher, seen = watched(client), list[str]()
    client.text.connect(lambda text, _: seen.append(text))
    client.finished.connect(lambda *_: seen.append("finished"))
    client.state_changed.connect(lambda state: seen.append(str(state)))
    number = client.sharing.submit(ASK)
    assert isinstance(watcher.end_of(number), Finished)
    with qtbot.waitSignal(client.finished):
        client.generate(ASK)
    assert "".join(text for text in seen if "Hello" in text).count("Hello") == 1
    assert seen.count("finished") == 1
    texts = [one for one in watcher.events if isinstance(one.event, TokenText)]
    assert {one.command_id for one in texts} == {number, number + 1}, "it sees the window's"


def test_the_engine_is_not_idle_while_others_use_it(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    watcher = watched(client)
    script.hold, script.hold_after = True, 1
    used_at = client.sharing.used_at
    number = client.sharing.submit(ASK)
    assert not client.is_idle
    assert not client.ask_aside(ASK, lambda _: None)
    watcher.wait_for_text()
    client.sharing.cancel(number)
    end = watcher.end_of(number)
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert client.is_idle
    assert client.sharing.used_at > used_at


def test_a_gauge_that_others_look_at_is_no_use_of_the_engine(client: EngineClient) -> None:
    """Else a monitor would keep a model loaded that nobody uses."""
    watcher = watched(client)
    used_at = client.sharing.used_at
    number = client.sharing.submit(CountCache())
    (reply,) = [one.event for one in watcher.events if one.command_id == number]
    assert isinstance(reply, CacheCounted)
    assert client.sharing.used_at == used_at
    assert not client.sharing.n_running


def test_another_engine_has_no_model_for_others(client: EngineClient) -> None:
    watcher = watched(client)
    client.sharing.use(None)
    (lost,) = watcher.events
    assert isinstance(lost.event, Failed)
    assert lost.event.is_model_lost


def test_a_load_ends_what_others_have_asked(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    watcher = watched(client)
    script.hold, script.hold_after = True, 1
    numbers = [client.sharing.submit(ASK), client.sharing.submit(ASK)]
    watcher.wait_for_text()
    with qtbot.waitSignal(client.load_doing):
        client.load(LoadParams("/models/other.gguf"))
    assert [watcher.end_of(number).reason for number in numbers] == ["cancelled"] * 2  # type: ignore[union-attr]
    with qtbot.waitSignal(client.loaded):
        client._host.let_go(script)  # type: ignore[union-attr]


def test_a_loss_is_told_to_both(qtbot: QtBot, client: EngineClient, script: Script) -> None:
    """The model is the window's, too, whoever has asked for what has cost it."""
    watcher = watched(client)
    script.answer_error, script.loses_model = EngineCrashed("The engine has ended.", ""), True
    with qtbot.waitSignal(client.lost):
        number = client.sharing.submit(ASK)
    assert isinstance(watcher.end_of(number), Failed)
    assert client.model is None
    assert client.sharing.watch(watcher) is None
    assert client.sharing.n_running == 0


def test_a_watcher_learns_which_model_is_loaded_before_its_first_event(
    qtbot: QtBot, client: EngineClient
) -> None:
    assert client.sharing.watch(Watcher()) == client.model
    with qtbot.waitSignal(client.unloaded):
        client.unload()
    assert client.sharing.watch(Watcher()) is None


def test_fallbacks_belong_to_the_window_and_end_nothing(
    qtbot: QtBot, client: EngineClient, script: Script
) -> None:
    watcher = watched(client)
    script.extra, script.hold = [FallbacksChanged(())], True
    with qtbot.waitSignal(client.fallbacks_changed):
        number = client.sharing.submit(ASK)
    client.sharing.cancel(number)
    assert isinstance(watcher.end_of(number), Finished)


class HostOfOneThread:
    """A host that sends events while it is called, as that of servers does."""

    def __init__(self, sharing: EngineSharing) -> None:
        self._sharing, self.seen = sharing, list[bool]()

    def submit(self, command: Command, generation: int) -> int:
        if command is not ASK:
            self.cancel(generation)
        return generation

    def cancel(self, generation: int) -> None:
        self.seen.append(self._sharing.take(HostEvent(generation, END)))


def test_hosts_may_send_events_while_they_are_called() -> None:
    sharing = EngineSharing()
    host = HostOfOneThread(sharing)
    sharing.use(host)  # type: ignore[arg-type]
    sharing.submit(AnswerRequest((), prompt="at once"))
    assert sharing.n_running == 0
    sharing.submit(ASK)
    assert sharing.n_running == 1
    sharing.cancel_all()
    assert sharing.n_running == 0
    assert host.seen == [True, True]


def test_without_an_engine_a_command_is_refused_and_older_ones_fail() -> None:
    sharing, watcher = EngineSharing(), Watcher()
    with pytest.raises(EngineError, match="No model is loaded"):
        sharing.submit(ASK)
    sharing.watch(watcher)
    sharing.use(HostOfOneThread(sharing))  # type: ignore[arg-type]
    number = sharing.submit(ASK)
    sharing.take(HostEvent(1, model_loaded(PARAMS)))
    sharing.take(HostEvent(2, ModelUnloaded()))
    sharing.use(None)
    assert isinstance(watcher.end_of(number), Failed)
    assert sharing.n_running == 0
