"""Failures of the engine are told, and it goes on; what crosses the queue can be pickled."""

import pickle

import pytest

from engine import (
    AnswerRequest,
    EngineCrashed,
    EngineError,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    LoadState,
    OutOfDeviceMemory,
    Resplit,
    SaveState,
    Unload,
)
from engine import errors as error_module
from tests.helpers.desk import ASK, SHORT, Desk


def test_a_bug_is_reported_and_the_engine_goes_on(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    from engine.model.layers.mixers.attention import Attention

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "project", lambda *args: 1 / 0)
        failed = thread_desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineCrashed)
    assert "ZeroDivisionError" in str(failed.error)
    assert "ZeroDivisionError" in caplog.text, "the log has the traceback"
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_out_of_memory_ends_only_that_answer(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    from engine.backends.cpu.ops import CpuOps

    def exhausted(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "gated", exhausted)
        failed = thread_desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfDeviceMemory)
    assert "cpu has" in str(failed.error)
    assert isinstance(thread_desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_commands_and_events_can_be_pickled(path: str, thread_desk: Desk) -> None:
    loaded = thread_desk.run(Load(LoadParams(path)))
    commands = Load(LoadParams(path)), AnswerRequest(ASK), Unload(), Resplit(LoadParams(path))
    for thing in (*commands, SaveState("x"), LoadState("x"), HostEvent(1, loaded)):
        assert pickle.loads(pickle.dumps(thing)) == thing


ERRORS = [
    error_module.EngineError("What.", "Do."),
    error_module.InvalidGGUF("a.gguf", "it is broken"),
    error_module.MissingShard("a.gguf", ["b.gguf"]),
    error_module.UnsupportedArchitecture("a.gguf", "x", ["llama"]),
    error_module.UnsupportedQuant("a.gguf", "Q9", "w"),
    error_module.NoDevice("cuda:9", "why"),
    error_module.OutOfDeviceMemory("cpu", 2, 1, "to load"),
    error_module.CommError(1, "stalled", "cuda:1"),
    error_module.ContextOverflow(5, 4),
    error_module.ContextOverflow(9, 4, 5),
    error_module.StateFileError("chat.state", "It is damaged."),
    error_module.Cancelled("Loading"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling_with_all_they_know(error: EngineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert str(error).endswith(".")
