"""While a long text is tokenised for one command, others are answered."""

import threading
from collections.abc import Iterator

import pytest

from engine import (
    AnswerRequest,
    ContextOverflow,
    Failed,
    Finished,
    Load,
    LoadParams,
    ModelUnloaded,
    Tokenize,
    Tokenized,
    Unload,
)
from engine.text.tokenizer import Tokenizer
from tests.helpers.desk import ASK, SHORT, Desk

LONG_TEXT = "hello world " * 2000
WAIT_S = 20.0


@pytest.fixture
def gate(
    monkeypatch: pytest.MonkeyPatch, thread_desk: Desk, path: str
) -> Iterator[threading.Event]:
    """Hold the encoder at long texts until the event is set, or an engine without threads hangs."""
    thread_desk.run(Load(LoadParams(path)))
    opened, encode = threading.Event(), Tokenizer.encode

    def held(tokenizer: Tokenizer, text: str, *args: bool, **options: bool) -> list[int]:
        if len(text) >= len(LONG_TEXT):
            assert opened.wait(WAIT_S), "nobody has let the encoder go on"
        return encode(tokenizer, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    yield opened
    opened.set()


def test_answers_and_short_questions_do_not_wait_for_a_long_one(
    thread_desk: Desk, gate: threading.Event
) -> None:
    long = thread_desk.host.submit(Tokenize(LONG_TEXT))
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    assert isinstance(thread_desk.run(Tokenize("hello")), Tokenized)
    gate.set()
    found = thread_desk.closing(long)
    assert isinstance(found, Tokenized)
    assert len(found.ids) > 2000


def test_answers_do_not_wait_for_a_long_prompt(thread_desk: Desk, gate: threading.Event) -> None:
    long = thread_desk.host.submit(AnswerRequest(prompt=LONG_TEXT, sampling=SHORT))
    given_up = thread_desk.host.submit(AnswerRequest(prompt=LONG_TEXT, sampling=SHORT))
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    thread_desk.host.cancel(given_up)
    ended = thread_desk.closing(given_up)
    assert isinstance(ended, Finished)
    assert ended.reason == "cancelled"
    gate.set()
    failed = thread_desk.closing(long)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ContextOverflow)


def test_a_model_that_is_to_go_answers_what_was_asked_before(
    thread_desk: Desk, gate: threading.Event
) -> None:
    long = thread_desk.host.submit(Tokenize(LONG_TEXT))
    unload = thread_desk.host.submit(Unload())
    threading.Timer(0.2, gate.set).start()
    assert isinstance(thread_desk.closing(long), Tokenized)
    assert isinstance(thread_desk.closing(unload), ModelUnloaded)
