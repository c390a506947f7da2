"""Models are loaded, split anew and left, and a failure keeps the old one."""

import threading
from pathlib import Path

import pytest

from engine import (
    AnswerRequest,
    Cancelled,
    ContextShifted,
    EngineCrashed,
    Failed,
    Finished,
    Load,
    LoadParams,
    LoadProgress,
    ModelLoaded,
    ModelResplit,
    OutOfDeviceMemory,
    PrefillProgress,
    Resplit,
    TokenText,
    TokenTimes,
    Unload,
)
from tests.helpers.desk import ASK, LONG, SHORT, Desk


def test_progress_ends_at_the_whole(desk: Desk, path: str) -> None:
    before = desk.host.submit(Unload())
    desk.closing(before)
    generation = desk.host.submit(Load(LoadParams(path)))
    last = None
    while isinstance(found := desk.next().event, LoadProgress):
        last = found
    assert isinstance(found, ModelLoaded)
    assert last is not None
    assert last.done_bytes == last.total_bytes > 0
    assert generation == before + 1


def test_a_failed_load_keeps_the_old_model(desk: Desk, path: str, tmp_path: Path) -> None:
    desk.run(Load(LoadParams(path)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(path).read_bytes()[:-1000])
    for bad in (broken, tmp_path / "none.gguf", __file__):
        failed = desk.run(Load(LoadParams(str(bad))))
        assert isinstance(failed, Failed)
        assert not isinstance(failed.error, EngineCrashed)
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_a_load_cancelled_midway_keeps_the_old_model(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    reached, go_on = threading.Event(), threading.Event()
    from engine.runtime.loader import ByteProgress

    original = ByteProgress.add

    def slow(self: ByteProgress, n_bytes: int) -> None:
        reached.set()
        go_on.wait(10)
        original(self, n_bytes)

    monkeypatch.setattr(ByteProgress, "add", slow)
    generation = thread_desk.host.submit(Load(LoadParams(path, ("cpu",) * 3)))
    assert reached.wait(10)
    thread_desk.host.cancel()
    go_on.set()
    failed = thread_desk.closing(generation)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Cancelled)
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_a_model_is_split_anew_and_remembers(desk: Desk, path: str) -> None:
    before = desk.run(Load(LoadParams(path, ("cpu", "cpu"), (3, 1))))
    assert isinstance(before, ModelLoaded)
    assert isinstance(first := desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    params = LoadParams(path, ("cpu",) * 3, (1, 2, 1))
    generation = desk.host.submit(Resplit(params))
    seen = []
    while isinstance((found := desk.next()).event, LoadProgress):
        seen.append(found)
    assert seen
    assert {event.command_id for event in [*seen, found]} == {generation}
    assert isinstance(found.event, ModelResplit)
    assert found.event.model.params == params
    assert found.event.model.model_hash == before.model_hash != ""
    assert [m.device for m in found.event.model.memory] == ["cpu"] * 3
    assert found.event.n_tokens == first.usage.prompt_tokens + 4
    second = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(second, Finished)
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1


def test_an_answer_goes_on_over_a_resplit(desk: Desk, path: str) -> None:
    """Re-splits are done between two tokens, a load waits until all answers have ended."""
    desk.run(Load(LoadParams(path, parallel=2)))
    text = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    first = desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 2, parallel=2)))
    other = desk.host.submit(AnswerRequest(ASK, sampling=LONG))
    second = desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 3, parallel=2)))
    load = desk.host.submit(Load(LoadParams(path)))
    waiting = desk.host.submit(AnswerRequest(ASK, sampling=SHORT))
    order = []
    while len(order) < 2:
        found = desk.next()
        assert found.command_id in (text, first, other, second)
        if isinstance(found.event, ModelResplit):
            order.append(found.command_id)
    assert order == [first, second]
    heard = set()
    while heard != {text, other}:
        found = desk.next()
        assert isinstance(found.event, TokenText | PrefillProgress | ContextShifted | TokenTimes)
        heard.add(found.command_id)
    for generation in (text, other):
        desk.host.cancel(generation)
    ends = [desk.closing_any() for _ in range(4)]
    assert {end.command_id for end in ends[:2]} == {text, other}
    assert [end.command_id for end in ends[2:]] == [load, waiting]
    assert [type(end.event) for end in ends] == [Finished, Finished, ModelLoaded, Finished]


def test_a_resplit_that_fails_or_is_cancelled_changes_nothing(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = thread_desk.run(Resplit(LoadParams(path)))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)
    thread_desk.run(Load(LoadParams(path)))
    for bad in (LoadParams(path, n_ctx=32), LoadParams(path, ("cpu",), (1, 2))):
        failed = thread_desk.run(Resplit(bad))
        assert isinstance(failed, Failed)
        assert not failed.is_model_lost
    running = thread_desk.host.submit(AnswerRequest(ASK, sampling=SHORT))
    waiting = thread_desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 2)))
    thread_desk.host.cancel()
    ends = {
        end.command_id: end.event for end in (thread_desk.closing_any(), thread_desk.closing_any())
    }
    assert isinstance(ends[running], Finished)
    assert isinstance(cancelled := ends[waiting], Failed)
    assert isinstance(cancelled.error, Cancelled)
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    monkeypatch.setattr("engine.runtime.resplit.Transfer.undo", lambda self: 1 / 0)
    monkeypatch.setattr("engine.runtime.resplit.load_rank", lambda *args: 1 / 0)
    lost = thread_desk.run(Resplit(LoadParams(path, ("cpu",) * 2)))
    assert isinstance(lost, Failed)
    assert lost.is_model_lost
    failed = thread_desk.run(AnswerRequest(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)


def test_a_model_makes_room_for_one_that_does_not_fit_beside_it(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model is loaded again when the new one fails for another reason."""
    thread_desk.run(Load(LoadParams(path)))

    from engine.runtime import thread_runtime

    calls = []
    original = thread_runtime.make_plan

    def first_is_full(*args: object) -> object:
        calls.append(args)
        if len(calls) in (1, 3, 4):
            raise OutOfDeviceMemory("cpu", 2 << 30, 1 << 30, "to load the model")
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(thread_runtime, "make_plan", first_is_full)
    assert isinstance(thread_desk.run(Load(LoadParams(path, n_ctx=32))), ModelLoaded)
    failed = thread_desk.run(Load(LoadParams(path)))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfDeviceMemory)
    assert len(calls) == 5, "the old one was planned again"
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
