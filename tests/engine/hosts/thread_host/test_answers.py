"""Answers come, are cancelled and end, each by itself."""

import itertools

import pytest

from engine import (
    AnswerRequest,
    Cancelled,
    ChatMessage,
    ContextOverflow,
    ContextShifted,
    Failed,
    Finished,
    Load,
    LoadParams,
    ModelLoaded,
    ModelUnloaded,
    SamplingParams,
    TokenText,
    TokenTimes,
    Unload,
)
from tests.helpers.desk import ASK, HOSTS, LONG, SHORT, Desk


def test_a_model_loads_answers_and_leaves(desk: Desk, path: str) -> None:
    loaded = desk.run(Load(LoadParams(path, ("cpu", "cpu"), (3, 1))))
    assert isinstance(loaded, ModelLoaded)
    assert loaded.n_batch == 512
    assert [m.device for m in loaded.memory] == ["cpu", "cpu"]
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    assert isinstance(desk.run(Unload()), ModelUnloaded)
    failed = desk.run(AnswerRequest(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)


def test_cancel_ends_an_answer_within_a_token(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    generation = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    desk.host.cancel()
    finished = desk.closing(generation)
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished), "usable after"


def test_cancel_ends_commands_that_wait(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    running = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    waiting = desk.host.submit(Load(LoadParams(path)))
    desk.host.cancel()
    assert isinstance(desk.closing(running), Finished)
    failed = desk.closing(waiting)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Cancelled)
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished), "the old model stays"


def test_one_command_is_cancelled_and_the_others_go_on(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    first = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    second = desk.host.submit(AnswerRequest(ASK, sampling=SHORT))
    third = desk.host.submit(AnswerRequest(ASK, sampling=SHORT))
    desk.host.cancel(second)
    desk.host.cancel(first)
    reasons = {}
    for _ in range(3):
        end = desk.closing_any()
        assert isinstance(end.event, Finished)
        reasons[end.command_id] = end.event.reason
    assert reasons == {first: "cancelled", second: "cancelled", third: "length"}


def test_an_error_behind_an_event_of_the_same_pass_is_told(desk: Desk, path: str) -> None:
    """The oldest message is left out, and the last one is too long even so."""
    desk.run(Load(LoadParams(path)))
    talk = (*ASK, ChatMessage("assistant", "hello"), ChatMessage("user", "hello " * 100))
    number = desk.host.submit(AnswerRequest(talk, sampling=LONG))
    assert isinstance(desk.next().event, ContextShifted)
    failed = desk.closing(number)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ContextOverflow)
    assert failed.error.is_of_last
    assert str(failed.error).startswith("Even without older messages, the prompt of ")
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_some_tokens_say_where_their_time_went(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    for every, n in ((16, 2), (3, 13), (0, 0)):
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        generation = desk.host.submit(AnswerRequest(ASK, sampling=sampling, timed_every=every))
        found = []
        while not isinstance(event := desk.next().event, Finished):
            if isinstance(event, TokenTimes):
                found.append(event)
        assert len(found) == n, generation
        for earlier, later in itertools.pairwise(found):
            assert later.position - earlier.position == every
        for times in found:
            assert len(times.ranks) == 2
            assert all(0 < r.computed_s + r.waited_s <= times.seconds for r in times.ranks)
    failed = desk.run(AnswerRequest(ASK, timed_every=-1))
    assert isinstance(failed, Failed)


@pytest.mark.parametrize("kind", HOSTS)
def test_closing_while_generating_ends_in_time(path: str, kind: str) -> None:
    desk = Desk(kind)
    desk.run(Load(LoadParams(path)))
    desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    assert desk.host.close(timeout_s=5)
