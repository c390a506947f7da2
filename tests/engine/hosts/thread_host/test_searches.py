"""Searches for the fastest split leave everything as it was."""

from pathlib import Path

import pytest

from engine import (
    AnswerRequest,
    EngineCrashed,
    EngineError,
    Failed,
    Finished,
    Load,
    LoadParams,
    ModelLoaded,
    Tune,
    Tuned,
    TuneProgress,
    TuneStarted,
)
from tests.helpers.desk import ASK, SHORT, Desk


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("other", [{}, {"n_ctx": 48}], ids=["same model", "other context"])
def test_a_search_leaves_model_and_conversation_as_they_were(
    desk: Desk, path: str, other: dict[str, int]
) -> None:
    params = LoadParams(path, ("cpu",) * 3, (1, 2, 1))
    before = desk.run(Load(params))
    assert isinstance(before, ModelLoaded)
    assert isinstance(first := desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    generation = desk.host.submit(Tune(LoadParams(path, ("cpu", "cpu"), **other), budget_s=3))
    assert isinstance(desk.next().event, TuneStarted)
    assert isinstance(progress := desk.next().event, TuneProgress)
    assert progress.best == progress.trial
    tuned = desk.closing(generation)
    assert isinstance(tuned, Tuned)
    assert tuned.result.winner is not None
    assert tuned.result.model_hash == before.model_hash
    assert tuned.model is not None
    assert tuned.model.params == params
    assert [m.device for m in tuned.model.memory] == ["cpu"] * 3
    second = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(second, Finished)
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1


def test_a_search_can_be_cancelled_and_needs_no_model(desk: Desk, path: str, home: Path) -> None:
    generation = desk.host.submit(Tune(LoadParams(path, ("cpu", "cpu")), "prompts", 60))
    while not isinstance(desk.next().event, TuneProgress):
        pass
    desk.host.cancel()
    tuned = desk.closing(generation)
    assert isinstance(tuned, Tuned)
    assert tuned.model is None
    assert not tuned.result.is_complete
    assert tuned.result.trials
    assert isinstance(desk.run(AnswerRequest(ASK)), Failed), "nothing stays loaded"
    assert {file.name for file in (home / "cache").iterdir()} >= {"tunings.json"}
    assert not list((home / "cache").glob("tandem-*")), "no conversation is left behind"
    for bad in (Tune(LoadParams(__file__)), Tune(LoadParams(path), "what")):
        assert isinstance(desk.run(bad), Failed)


@pytest.mark.usefixtures("home")
def test_a_search_that_fails_brings_the_model_back_or_says_that_it_is_lost(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    monkeypatch.setattr("engine.hosts.tuning.TrialModel.measure", lambda *args: 1 / 0)
    failed = thread_desk.run(Tune(LoadParams(path, ("cpu", "cpu"), n_ctx=48)))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineCrashed)
    assert not failed.is_model_lost
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)

    def gone(*args: object, **options: object) -> None:
        raise EngineError("The file is gone.")

    monkeypatch.setattr("engine.hosts.tuning.Model", gone)
    failed = thread_desk.run(Tune(LoadParams(path, ("cpu", "cpu"), n_ctx=48)))
    assert isinstance(failed, Failed)
    assert failed.is_model_lost
