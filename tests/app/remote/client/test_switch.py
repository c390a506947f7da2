from collections.abc import Callable, Iterator

import pytest

from app.remote.client.address import RemoteAddress
from app.remote.client.switch import LOCAL, HostSwitch
from engine import (
    AnswerRequest,
    ChatMessage,
    EngineCrashed,
    Event,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
    ModelUnloaded,
    TokensCounted,
    Tune,
    Unload,
)
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.fake_openai import FakeOpenAI, fake_openai

HERE = Load(LoadParams("/models/tiny.gguf"))
TOGETHER = Load(LoadParams("/models/tiny.gguf", ("cpu", "1/cpu")))
HELLO = AnswerRequest((ChatMessage("user", "Hi"),))


class Both:
    """A switch over a fake engine and a fake server, whose events are collected."""

    def __init__(self) -> None:
        import queue

        self.events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.engines: list[FakeHost] = []
        self.teams: list[FakeHost] = []
        self.switch = HostSwitch(
            self.events.put, self._make_engine, lambda _: "", self._make_team, starts_local=False
        )

    def _make_engine(self, on_event: object) -> FakeHost:
        self.engines.append(FakeHost(on_event, Script()))  # type: ignore[arg-type]
        return self.engines[-1]

    def _make_team(self, on_event: Callable[[HostEvent], None]) -> FakeHost:
        self.teams.append(FakeHost(on_event, Script()))
        return self.teams[-1]

    def do(self, command: object) -> Event:
        """Submit a command and return its closing event; those of others are passed over."""
        number = self.switch.submit(command)  # type: ignore[arg-type]
        closing = (Finished, Failed, ModelLoaded, ModelUnloaded, TokensCounted)
        while True:
            found = self.events.get(timeout=20)
            if found.command_id == number and isinstance(found.event, closing):
                return found.event


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai() as made:
        yield made


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    assert made.switch.close()


def there(server: FakeOpenAI) -> Load:
    return Load(LoadParams(RemoteAddress(f"{server.url}/v1", "small").path))


def test_a_remote_model_needs_no_engine(both: Both, server: FakeOpenAI) -> None:
    assert isinstance(both.do(there(server)), ModelLoaded)
    assert isinstance(both.do(HELLO), Finished)
    assert not both.engines
    assert len(server.answered) == 1


def test_the_side_whose_model_is_replaced_frees_it(both: Both, server: FakeOpenAI) -> None:
    both.do(HERE)
    both.do(there(server))
    both.do(HELLO)
    assert [type(one) for one in both.engines[0].commands] == [Load, Unload]
    both.do(HERE)
    both.do(HELLO)
    assert [type(one) for one in both.engines[0].commands] == [Load, Unload, Load, AnswerRequest]
    number = both.switch.submit(Unload())
    told = []
    while not any(isinstance(one.event, ModelUnloaded) for one in told):
        told.append(both.events.get(timeout=20))
    assert told[-1].command_id == number  # of those that nobody asked for none was told


def test_a_failed_load_keeps_what_is_loaded(both: Both, server: FakeOpenAI) -> None:
    both.do(HERE)
    failed = both.do(Load(LoadParams(f"{server.url}/v1#unknown")))
    assert isinstance(failed, Failed)
    assert isinstance(both.do(HELLO), Finished)
    assert isinstance(both.engines[0].commands[-1], AnswerRequest)
    assert not server.answered


def test_the_end_of_an_engine_is_no_loss_of_a_remote_model(both: Both, server: FakeOpenAI) -> None:
    both.do(HERE)
    both.do(there(server))
    both.switch._pass_on(
        LOCAL, HostEvent(0, Failed(EngineCrashed("It ended."), is_model_lost=True))
    )
    last = both.events.get(timeout=20)
    while last.command_id:
        last = both.events.get(timeout=20)
    assert isinstance(last.event, Failed)
    assert not last.event.is_model_lost


def test_nothing_is_searched_while_a_remote_model_is_in_use(both: Both, server: FakeOpenAI) -> None:
    both.do(there(server))
    assert isinstance(both.do(Tune(HERE.params)), Failed)
    assert not both.engines


def test_devices_of_other_machines_are_their_hosts_business(both: Both) -> None:
    both.do(HERE)
    assert isinstance(both.do(TOGETHER), ModelLoaded)
    assert isinstance(both.do(HELLO), Finished)
    assert [type(one) for one in both.engines[0].commands] == [Load, Unload]
    assert [type(one) for one in both.teams[0].commands] == [Load, AnswerRequest]
    both.switch.team()
    assert len(both.teams) == 1
    lost = Failed(EngineCrashed("A machine is gone."), is_model_lost=True)
    both.teams[0]._on_event(HostEvent(0, lost))
    found = both.events.get(timeout=20)
    while found.command_id or not isinstance(found.event, Failed):
        found = both.events.get(timeout=20)
    assert found.event.is_model_lost
    both.do(HERE)
    assert isinstance(both.teams[0].commands[-1], Unload)
