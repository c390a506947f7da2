"""An engine host together with the queue of its events, and what tests ask of it."""

import queue
from collections.abc import Callable
from typing import get_args

from engine import (
    ChatMessage,
    Command,
    EngineHost,
    EngineReady,
    Event,
    Failed,
    Finished,
    HostEvent,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    ProcessHost,
    SamplingParams,
    StateLoaded,
    StateSaved,
    ThreadHost,
    Tuned,
)
from engine.generation.requests import Reply
from engine.hosts.thread_host import EventSink

LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, on_overflow="shift")
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ASK = (ChatMessage("user", "hello"),)

CLOSING = (
    ModelLoaded, ModelResplit, ModelUnloaded, Finished, StateSaved, StateLoaded, Tuned,
    Failed, *get_args(Reply),
)  # fmt: skip
"""Events that end a command."""

HOSTS: dict[str, Callable[[EventSink], EngineHost]] = {
    "thread": ThreadHost, "process": ProcessHost,
}  # fmt: skip
"""The hosts that the same tests hold for. Tests that change the engine's insides need a thread."""


class Desk:
    """A host and the queue of its events."""

    def __init__(self, kind: str = "thread") -> None:
        self.events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.host = HOSTS[kind](self.events.put)
        ready = self.next()
        assert ready.command_id == 0
        assert isinstance(ready.event, EngineReady)

    def next(self) -> HostEvent:
        return self.events.get(timeout=30)

    def closing(self, generation: int) -> Event:
        """Skip to the event that ends a command."""
        while True:
            found = self.next()
            assert found.command_id == generation
            if isinstance(found.event, CLOSING):
                return found.event

    def closing_any(self) -> HostEvent:
        """Skip to the event that ends any command."""
        while not isinstance((found := self.next()).event, CLOSING):
            pass
        return found

    def run(self, command: Command) -> Event:
        return self.closing(self.host.submit(command))
