"""The engine's process dies in every way: what is said, what goes on, and that nothing is left."""

import errno
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    Command,
    CountTokens,
    EngineCrashed,
    EngineReady,
    Event,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
    ProcessHost,
    SamplingParams,
    TokenText,
    Unload,
)
from engine.hosts.process import process_host
from engine.hosts.process.child import Death, crash_of
from engine.hosts.process.codec import MAX_BYTES, MessageError
from tests.helpers.new_threads import new_threads
from tests.helpers.tiers import paired
from tests.helpers.tiny_gguf import tiny_gguf

if sys.platform == "win32":
    pytest.skip("processes are ended by signals here", allow_module_level=True)

ASK = (ChatMessage("user", "hello"),)
LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, on_overflow="shift")
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
WAIT_S = 60


class Office:
    """A host in a process and the queue of its events."""

    def __init__(self, command: tuple[str, ...] = process_host.PROGRAM) -> None:
        self.events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.host = ProcessHost(self.events.put, command)

    def until(self, wanted: Callable[[HostEvent], bool]) -> HostEvent:
        """Skip to the first event that is wanted."""
        while not wanted(found := self.events.get(timeout=WAIT_S)):
            pass
        return found

    def first(self, kind: type) -> HostEvent:
        return self.until(lambda found: isinstance(found.event, kind))

    def run(self, command: Command) -> Event:
        """Return the event that closes a command."""
        number = self.host.submit(command)
        closing = process_host.CLOSING_EVENTS
        return self.until(
            lambda found: found.command_id == number and isinstance(found.event, closing)
        ).event

    def crash(self) -> tuple[int, Failed, EngineCrashed]:
        """Return the next failure, which is a crash: its number, itself and the error."""
        found = self.first(Failed)
        assert isinstance(found.event, Failed)
        assert isinstance(found.event.error, EngineCrashed)
        return found.command_id, found.event, found.event.error


def is_gone(pid: int) -> bool:
    """Return whether a process ends within some seconds; a zombie of a dead parent has ended."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def office() -> Iterator[Office]:
    before = threading.enumerate()
    made = Office()
    yield made
    pid = made.host.pid
    assert made.host.close(20)
    assert made.host.pid is None
    assert pid is None or is_gone(pid)
    assert new_threads(before) == []


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=64))


def pid_of(host: ProcessHost) -> int:
    while (pid := host.pid) is None:
        time.sleep(0.01)
    return pid


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGKILL, "was killed (SIGKILL)", marks=pytest.mark.slow),
        (signal.SIGSEGV, "crashed accessing an invalid memory address (SIGSEGV)"),
        pytest.param(
            signal.SIGABRT, "aborted after an internal error (SIGABRT)", marks=pytest.mark.slow
        ),
        (signal.SIGSTOP, "was stopped by another program"),
    ],
    ids=["kill", "segv", "abort", "stop"],
)
def test_a_death_is_told_in_words_and_the_next_load_answers(
    office: Office, path: str, number: signal.Signals, said: str
) -> None:
    assert isinstance(office.run(Load(LoadParams(path, ("cpu", "cpu")))), ModelLoaded)
    answering = office.host.submit(AnswerRequest(ASK, sampling=LONG))
    waiting = office.host.submit(Unload())
    office.first(TokenText)
    os.kill(pid_of(office.host), number)
    start = time.monotonic()
    generation, failed, error = office.crash()
    assert time.monotonic() - start < 5
    assert generation == answering
    assert failed.is_model_lost
    assert error.message == f"The engine {said} while answering on cpu."
    assert "Load the model again" in error.hint
    if number in (signal.SIGSEGV, signal.SIGABRT):
        assert "Fatal Python error" in error.hint, "the trace says where"
        assert "File " in error.hint
    generation, failed, _ = office.crash()
    assert generation == waiting
    assert not failed.is_model_lost, "it was lost before"
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    finished = office.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == 5


def test_a_death_while_idle_is_told_too_and_only_a_command_starts_another(
    office: Office, path: str
) -> None:
    os.kill(pid_of(office.host), signal.SIGKILL)
    generation, failed, error = office.crash()
    assert (generation, failed.is_model_lost) == (0, False)
    assert error.message.startswith("The engine was killed (SIGKILL) while ")
    assert office.host.pid is None
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    os.kill(pid_of(office.host), signal.SIGKILL)
    generation, failed, error = office.crash()
    assert (generation, failed.is_model_lost) == (0, True)
    assert error.message == "The engine was killed (SIGKILL) while it was idle on cpu."


@pytest.mark.slow
def test_a_death_while_tokens_are_counted_is_one_while_idle(office: Office, path: str) -> None:
    """Nobody has asked for that: a gauge shows it."""
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    os.kill(pid_of(office.host), signal.SIGSTOP)
    number = office.host.submit(CountTokens(None, "hello"))
    os.kill(pid_of(office.host), signal.SIGKILL)
    generation, failed, error = office.crash()
    assert (generation, failed.is_model_lost) == (number, True)
    assert error.message == "The engine was killed (SIGKILL) while it was idle on cpu."


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_what_a_terminal_sends_to_all_processes_leaves_the_engine_to_the_window(
    office: Office, path: str, name: str
) -> None:
    office.run(Load(LoadParams(path)))
    os.kill(pid_of(office.host), getattr(signal, name))
    assert isinstance(office.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_a_command_that_cannot_be_sent_fails_alone(office: Office, path: str) -> None:
    office.run(Load(LoadParams(path)))
    failed = office.run(AnswerRequest(prompt="x" * MAX_BYTES))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, MessageError)
    assert not failed.is_model_lost
    assert isinstance(office.run(AnswerRequest(ASK, sampling=SHORT)), Finished)


def test_the_first_event_is_that_the_engine_is_ready_also_after_deaths(
    office: Office, path: str
) -> None:
    first = office.events.get(timeout=WAIT_S)
    assert first.command_id == 0
    assert isinstance(first.event, EngineReady)
    os.kill(pid_of(office.host), signal.SIGKILL)
    office.crash()
    number = office.host.submit(Unload())
    assert office.events.get(timeout=WAIT_S).command_id == number, "ready is said once"


def program(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_a_process_that_dies_at_once_is_started_again_and_again_but_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_host, "BACK_OFF_S", (0.0, 0.2, 0.4))
    office = Office(program("import sys; sys.exit('it is broken')"))
    waits = []
    number = 0
    for _ in range(5):
        start = time.monotonic()
        generation, failed, error = office.crash()
        waits.append(time.monotonic() - start)
        assert generation == number
        assert error.message == (
            "The engine exited unexpectedly (exit status 1) while it was starting."
        )
        assert "it is broken" in error.hint
        assert not failed.is_model_lost
        number = office.host.submit(Unload())
    assert waits[2] > 0.2
    assert min(waits[3:]) > 0.4
    assert office.host.close(), "also in the middle of a wait"


def test_a_process_that_lived_for_a_while_is_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_host, "BACK_OFF_S", (0.0, 1000.0))
    monkeypatch.setattr(process_host, "HEALTHY_S", 0.0)
    office = Office(program("import sys; sys.exit('it is broken')"))
    for _ in range(3):
        office.crash()
        office.host.submit(Unload())
    office.crash()
    assert office.host.close()


def test_a_program_that_is_not_there_is_a_sentence() -> None:
    office = Office(("/nonexistent/python",))
    error = office.crash()[2]
    assert error.message == "The engine cannot be started: No such file or directory."
    assert error.hint.startswith("Reinstall Tandem")
    assert office.host.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            OSError(errno.ENOMEM, "no memory"), "Cannot allocate memory", marks=pytest.mark.slow
        ),
        pytest.param(
            OSError(errno.EAGAIN, "too many processes"),
            "Resource temporarily unavailable",
            marks=pytest.mark.slow,
        ),
        (MemoryError(), "Cannot allocate memory"),
        pytest.param(OSError("strange"), "strange", marks=pytest.mark.slow),
    ],
    ids=["memory", "processes", "python's memory", "other"],
)
def test_a_process_that_cannot_be_started_is_a_sentence_and_the_next_command_tries_again(
    monkeypatch: pytest.MonkeyPatch, path: str, error: Exception, said: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as context:
        context.setattr("engine.hosts.process.child.subprocess.Popen", fails)
        office = Office()
        _, failed, crash = office.crash()
        assert not failed.is_model_lost
        assert crash.message == f"The engine cannot be started: {said}."
        assert "load the model again" in crash.hint.lower()
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    assert office.host.close(20)


def test_a_process_without_memory_for_its_threads_is_ended(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real_start, real_process = threading.Thread.start, subprocess.Popen

    def start(thread: threading.Thread) -> None:
        if thread.name == "tandem-commands":
            raise RuntimeError("can't start new thread")
        real_start(thread)

    def note(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(real_process(*args, **options))
        return started[-1]

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", start)
        context.setattr("engine.hosts.process.child.subprocess.Popen", note)
        office = Office()
        assert "cannot be started: Cannot allocate memory" in office.crash()[2].message
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    assert office.host.close(20)


POISONED = """
import sys
from engine.errors import CommError, DeviceStopped
from engine.hosts.thread_host import ThreadHost
from engine.hosts.process import program

def generate(self, number, command):
    if command.prompt == "poison":
        self._free()  # as a model on a card that has stopped
        raise DeviceStopped("cuda:0", "an illegal address")
    if command.prompt == "hang":
        self._free()  # its thread stays for ever, with all that it refers to
        raise CommError(1, "has shown no sign of life for 30 s", "cuda:1")
    answer(self, number, command)

def load(self, number, command):
    if len(command.params.devices) > 2:
        raise DeviceStopped("cuda:1", "an illegal address")
    first_load(self, number, command)

answer, ThreadHost._generate = ThreadHost._generate, generate
first_load, ThreadHost._load = ThreadHost._load, load
sys.exit(program.main())
"""


def test_a_device_that_has_stopped_ends_the_process_and_the_next_load_has_a_fresh_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's state of a card dies with the process, so no restart of Tandem is needed."""
    monkeypatch.setattr(process_host, "BACK_OFF_S", (1000.0,))
    office = Office(program(POISONED))
    for _ in range(2):  # it has not died: the next one starts at once
        assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
        pid = pid_of(office.host)
        failed = office.run(AnswerRequest(prompt="poison"))
        assert isinstance(failed, Failed)
        assert failed.is_model_lost
        assert str(failed.error) == "cuda:0 has stopped working: an illegal address."
        assert failed.error.hint == (
            "Load the model again; if this comes back, load it without cuda:0."
        )
        assert is_gone(pid)
        assert office.host.pid is None
    assert office.events.empty(), "it is no crash"
    assert office.host.close(20)


@pytest.mark.slow
def test_a_device_that_hangs_ends_the_process_as_well(path: str) -> None:
    """Nothing else frees the memory that a thread in it holds."""
    office = Office(program(POISONED))
    office.run(Load(LoadParams(path)))
    pid = pid_of(office.host)
    failed = office.run(AnswerRequest(prompt="hang"))
    assert isinstance(failed, Failed)
    assert failed.error.message == "cuda:1 (rank 1) has shown no sign of life for 30 s."
    assert failed.error.hint.startswith("Load the model again")
    assert is_gone(pid)
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    assert office.host.close(20)


@pytest.mark.slow
def test_a_model_that_a_stopped_device_has_not_touched_stays_until_it_is_ejected(path: str) -> None:
    office = Office(program(POISONED))
    loaded = office.run(Load(LoadParams(path)))
    assert isinstance(loaded, ModelLoaded)
    pid = pid_of(office.host)
    failed = office.run(Load(LoadParams(path, ("cpu",) * 3)))
    assert isinstance(failed, Failed)
    assert not failed.is_model_lost
    assert failed.error.hint == f"{loaded.info.name} still answers; eject it to use cuda:1 again."
    assert isinstance(office.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    assert office.host.pid == pid
    office.run(Unload())
    assert is_gone(pid)
    assert isinstance(office.run(Load(LoadParams(path))), ModelLoaded)
    assert office.host.close(20)


@pytest.mark.parametrize("data", [b"x", b'[1,{"type":"Popen"}]', b"\x80\x04N."])
def test_a_process_that_sends_nonsense_is_ended(data: bytes) -> None:
    code = (
        "import sys, time; from multiprocessing.connection import Connection\n"
        f"Connection(int(sys.argv[1])).send_bytes({data!r}); time.sleep(60)"
    )
    office = Office(program(code))
    assert "sent an invalid message" in office.crash()[2].message
    assert office.host.close()


def test_a_process_that_hangs_is_ended_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hosts.process.child.SILENT_S", 1.0)
    code = "import faulthandler, time; faulthandler.enable(); time.sleep(60)"
    office = Office(program(code))
    _, _, error = office.crash()
    assert "no sign of life" in error.message
    assert "Fatal Python error" in error.hint
    assert office.host.close()


def test_a_process_that_computes_without_a_sign_of_life_has_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library may hold the interpreter's lock, as for a text of many megabytes."""
    monkeypatch.setattr(process_host, "TICK_S", 0.25)
    monkeypatch.setattr("engine.hosts.process.child.SILENT_S", 0.5)
    monkeypatch.setattr("engine.hosts.process.child.BUSY_S", 3.0)
    monkeypatch.setattr("engine.hosts.process.child.BUSY_SHARE", 0.01)
    office = Office(program("while True: pass"))
    assert "has shown no sign of life for 3 s" in office.crash()[2].message
    assert office.host.close()


def test_what_does_not_end_in_time_is_killed() -> None:
    before = threading.enumerate()
    office = Office(program("import time; time.sleep(60)"))
    pid = pid_of(office.host)
    assert not office.host.close(0.3)
    assert is_gone(pid)
    assert new_threads(before) == []


def test_a_cancel_reaches_a_process_that_was_still_starting(path: str) -> None:
    office = Office()
    number = office.host.submit(Load(LoadParams(path)))
    office.host.cancel()
    found = office.until(lambda found: found.command_id == number)
    assert isinstance(found.event, Failed)
    assert "cancelled" in found.event.error.message
    assert office.host.close(20)


PARENT = """
import sys, time
from engine import AnswerRequest, Load, LoadParams, ModelLoaded, ProcessHost
from engine import SamplingParams, TokenText
def said(event):
    if isinstance(event.event, TokenText):
        print(host.pid, flush=True)
host = ProcessHost(said)
host.submit(Load(LoadParams(sys.argv[1])))
sampling = SamplingParams(max_tokens=100_000, ignore_eos=True, on_overflow="shift")
host.submit(AnswerRequest(prompt="hello", sampling=sampling))
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("number", "is_stopped"), paired([signal.SIGKILL, signal.SIGTERM], [False, True])
)
def test_no_engine_outlives_the_window(path: str, number: int, is_stopped: bool) -> None:
    command = [sys.executable, "-c", PARENT, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if is_stopped and sys.platform == "linux":
            os.kill(pid, signal.SIGSTOP)  # what cannot notice that its connection has ended
        parent.send_signal(number)
        parent.wait(20)
        assert is_gone(pid)


@pytest.mark.parametrize(
    ("code", "is_short", "said"),
    [
        (-9, True, "system ran out of memory"),
        (-9, False, "Load the model again"),
        (-11, True, "Load the model again"),
    ],
)
def test_a_kill_for_lack_of_memory_is_explained(code: int, is_short: bool, said: str) -> None:
    error = crash_of(Death(code, "", (), is_short), "while answering")
    assert said in error.hint
    assert ("memory" in error.hint) == (said == "system ran out of memory")


@pytest.mark.parametrize(
    ("code", "said"),
    [(0xC0000005, "invalid memory address"), (3, "exit status 3"), (-64, "killed (SIGRTMAX)")],
)
def test_other_ends_are_told_as_well(code: int, said: str) -> None:
    assert said in str(crash_of(Death(code, "", (), False), "while it was idle"))


def test_warnings_of_the_process_are_in_the_log_while_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without what is only of interest at its end."""
    code = """
import logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
print("a library says something", file=sys.stderr)
logging.info("all is well")
logging.warning("slow")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("a command failed")
logging.info("on it goes")
print("Fatal Python error: a trace", file=sys.stderr, flush=True)
time.sleep(60)
"""
    caplog.set_level(logging.INFO, "engine.hosts.process.child")
    office = Office(program(code))
    deadline = time.monotonic() + WAIT_S
    while "ZeroDivisionError" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert found[:3] == [
        ("WARNING", "WARNING root: slow"),
        ("ERROR", "ERROR root: a command failed"),
        ("ERROR", "Traceback (most recent call last):"),
    ]
    assert found[-1] == ("ERROR", "ZeroDivisionError: division by zero")
    office.host.close(0.1)
    assert "on it goes" not in caplog.text
    assert "Fatal" not in caplog.text


def test_the_log_of_a_death_is_cut() -> None:
    log = tuple(f"{at} " + "x" * 500 for at in range(200))
    hint = crash_of(Death(1, "", log, False), "while it was idle").hint
    assert len(hint) < 500
    assert " | 199 xxx" in hint
