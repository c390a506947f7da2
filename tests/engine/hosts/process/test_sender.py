"""What the engine's process sends by itself: batches of tokens, urgent events, heartbeats."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine import (
    AnswerPart,
    EngineCrashed,
    Failed,
    Finished,
    HostEvent,
    StateLoaded,
    Timings,
    TokenLogprob,
    TokenText,
    TokenTimes,
    Usage,
)
from engine.hosts.process import channel as sender_module
from engine.hosts.process.channel import (
    FROM_ENGINE,
    TO_ENGINE,
    BeatMessage,
    Channel,
    EventSender,
    EventsMessage,
    FromEngine,
    ToEngine,
    connected_pair,
    merged,
)
from tests.helpers.new_threads import new_threads

END = Finished("stop", Usage(1, 0, 3), Timings())


class Wire:
    """A sender and the other end of its connection."""

    def __init__(self) -> None:
        theirs, ours = connected_pair()
        self.sender = EventSender(Channel[FromEngine, ToEngine](theirs, FROM_ENGINE, TO_ENGINE))
        self.channel = Channel[ToEngine, FromEngine](ours, TO_ENGINE, FROM_ENGINE)
        self._theirs = theirs

    def batch(self) -> tuple[HostEvent, ...]:
        """Return the events of the next message that has any."""
        while not isinstance(message := self.channel.receive(10), EventsMessage):
            assert message is not None
        return message.events

    def close(self) -> None:
        self.sender.close()
        self._theirs.close()
        self.channel.close()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(sender_module, "FRAME_S", 30.0)  # no test waits for a frame
    before = threading.enumerate()
    made = Wire()
    yield made
    made.close()
    assert new_threads(before) == []


def token(at: int) -> HostEvent:
    return HostEvent(1, TokenText(str(at), (at,)))


def test_tokens_wait_for_the_frame_and_go_in_one_message(wire: Wire) -> None:
    wire.sender.put(token(0))
    assert wire.batch() == (token(0),), "the first one does not wait"
    for at in range(1, 200):
        wire.sender.put(token(at))
    wire.sender.put(HostEvent(1, END))
    text = "".join(map(str, range(1, 200)))
    together = HostEvent(1, TokenText(text, tuple(range(1, 200))))
    assert wire.batch() == (together, HostEvent(1, END)), "in order"


def test_tokens_alone_come_at_the_frame_rate(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "FRAME_S", 0.2)
    start, n_messages, seen = time.monotonic(), 0, 0
    writer = threading.Thread(target=lambda: [wire.sender.put(token(at)) for at in range(500)])
    writer.start()
    while seen < 500:
        n_messages += 1
        (event,) = wire.batch()
        assert isinstance(event.event, TokenText)
        assert event.event.ids == tuple(range(seen, seen + len(event.event.ids)))
        seen += len(event.event.ids)
    writer.join()
    assert n_messages <= 2 + (time.monotonic() - start) / 0.2


def test_only_texts_of_one_answer_that_follow_each_other_are_joined() -> None:
    times = HostEvent(1, TokenTimes(3, 0.1, ()))
    events = (token(1), token(2), times, token(3), HostEvent(2, TokenText("x", (9, 8))))
    joined = HostEvent(1, TokenText("12", (1, 2)))
    assert merged(events) == (joined, *events[2:])
    assert merged(()) == ()


def test_parts_stay_apart_and_keep_what_is_known_of_their_tokens() -> None:
    def text(letter: str, part: AnswerPart) -> HostEvent:
        known = TokenLogprob(ord(letter), -0.5, ((1, -0.25),))
        return HostEvent(1, TokenText(letter, (ord(letter),), part, (known,)))

    thought = [text("a", "reasoning"), text("b", "reasoning")]
    said = [text("c", "content"), text("d", "content")]
    both = [event.event for event in merged([*thought, *said])]
    assert [(one.text, one.part) for one in both if isinstance(one, TokenText)] == [
        ("ab", "reasoning"), ("cd", "content"),
    ]  # fmt: skip
    told = [known.id for one in both if isinstance(one, TokenText) for known in one.logprobs]
    assert bytes(told) == b"abcd"


def test_tokens_of_answers_that_run_at_once_are_merged_for_each() -> None:
    def text(generation: int, letters: str) -> HostEvent:
        ids = tuple(map(ord, letters))
        return HostEvent(generation, TokenText(letters, ids))

    times = HostEvent(1, TokenTimes(7, 0.02, ()))
    events = [text(1, "a"), text(2, "x"), text(1, "b"), text(2, "y"), times, text(1, "c")]
    last = [HostEvent(2, END), text(1, "d"), text(3, "q")]
    assert merged(events) == (text(1, "ab"), text(2, "xy"), times, text(1, "c"))
    assert merged([*events, text(2, "z"), *last]) == (
        text(1, "ab"), text(2, "xyz"), times, text(1, "c"), HostEvent(2, END), text(1, "d"),
        text(3, "q"),
    )  # fmt: skip


def test_closing_sends_what_waits() -> None:
    wire = Wire()
    wire.sender.put(token(0))
    wire.batch()
    wire.sender.put(token(1))
    wire.sender.close()
    assert wire.batch() == (token(1),)
    wire.close()


def test_an_engine_that_says_nothing_still_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BEAT_S", 0.01)
    wire = Wire()
    for _ in range(5):
        assert wire.channel.receive(10) == BeatMessage()
    wire.close()


def test_an_event_that_cannot_be_sent_fails_its_command_and_no_other(wire: Wire) -> None:
    wire.sender.put(token(0))
    assert wire.batch() == (token(0),)
    wire.sender.put(token(1))
    wire.sender.put(HostEvent(2, StateLoaded("x", (object(),))))  # type: ignore[arg-type]
    assert wire.batch() == (token(1),)
    (event,) = wire.batch()
    assert event.command_id == 2
    assert isinstance(event.event, Failed)
    assert isinstance(event.event.error, EngineCrashed)
    wire.sender.put(HostEvent(3, END))
    assert wire.batch() == (HostEvent(3, END),)


def test_nobody_waits_for_a_window_that_is_gone(wire: Wire) -> None:
    wire.channel.close()
    for at in range(3):
        wire.sender.put(HostEvent(at, END))
    wire.sender.close()
