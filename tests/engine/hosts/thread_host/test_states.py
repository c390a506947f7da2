"""States of answers go to files and come back."""

from pathlib import Path

import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    Failed,
    Finished,
    Load,
    LoadParams,
    LoadState,
    SaveState,
    StateFileError,
    StateLoaded,
    StateProgress,
    StateSaved,
)
from tests.helpers.desk import ASK, SHORT, Desk


def test_a_state_goes_to_a_file_and_comes_back(desk: Desk, path: str, tmp_path: Path) -> None:
    file = str(tmp_path / "chat.state")
    for command in (SaveState(file), LoadState(file)):
        failed = desk.run(command)
        assert isinstance(failed, Failed)
        assert "No model is loaded" in str(failed.error)
    desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    first = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(first, Finished)
    generation = desk.host.submit(SaveState(file))
    assert isinstance(desk.next().event, StateProgress)
    saved = desk.closing(generation)
    n = first.usage.prompt_tokens + 4
    assert saved == StateSaved(file, n, Path(file).stat().st_size)
    desk.run(Load(LoadParams(path)))
    loaded = desk.run(LoadState(file))
    assert isinstance(loaded, StateLoaded)
    assert len(loaded.ids) == n
    again = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(again, Finished)
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1
    failed = desk.run(LoadState(str(tmp_path / "none")))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StateFileError)


def test_each_answer_has_a_state_of_its_own(
    thread_desk: Desk, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.hosts.thread_host.MAX_ENDED", 2)
    thread_desk.run(Load(LoadParams(path, parallel=4)))
    texts = ("one", "and two", "and now there are three")
    asked = [
        thread_desk.host.submit(AnswerRequest((ChatMessage("user", text),), sampling=SHORT))
        for text in texts
    ]
    ends = {end.command_id: end.event for end in (thread_desk.closing_any() for _ in texts)}
    too_old = next(iter(ends))
    failed = thread_desk.run(SaveState(str(tmp_path / "old"), too_old))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StateFileError)
    assert "too old" in str(failed.error)
    assert not list(tmp_path.iterdir())
    for number in set(asked) - {too_old}:
        end = ends[number]
        assert isinstance(end, Finished)
        told = thread_desk.run(SaveState(str(tmp_path / str(number)), number))
        assert isinstance(told, StateSaved)
        assert told.n_tokens == end.usage.total_tokens - 1
