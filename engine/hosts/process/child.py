"""The engine's process as seen by its parent: start, messages, end."""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from engine.errors import EngineCrashed, Sentence
from engine.events import Command, Load, LoadState, ModelLoaded, Resplit, SaveState, Tune
from engine.generation.requests import (
    AnswerRequest,
    ApplyTemplate,
    Detokenize,
    Embed,
    ScoreTokens,
    Tokenize,
)
from engine.hosts.process.channel import (
    FROM_ENGINE,
    TO_ENGINE,
    Channel,
    FromEngine,
    ToEngine,
    connected_pair,
)
from engine.hosts.process.codec import MessageError
from engine.util.programs import NO_WINDOW, child_environment, tie_child

LOG_LINES = 3
"""Number of lines to show the user from the end of the process's log."""

MAX_LINE = 120
"""Maximum number of characters shown per line."""

FATAL = "Fatal Python error"
"""Start of the line before the trace that `faulthandler` writes after a crash."""

_SIGNALS = {
    "SIGKILL": Sentence("was killed"),
    "SIGTERM": Sentence("was terminated by another program"),
    "SIGSEGV": Sentence("crashed accessing an invalid memory address"),
    "SIGBUS": Sentence("crashed reading memory or a file that no longer exists"),
    "SIGILL": Sentence("crashed on an instruction that this processor does not support"),
    "SIGFPE": Sentence("crashed on an invalid calculation"),
    "SIGABRT": Sentence("aborted after an internal error"),
}

_WINDOWS_CODES = {
    0xC0000005: _SIGNALS["SIGSEGV"],
    0xC000001D: _SIGNALS["SIGILL"],
    0xC0000017: Sentence("ran out of memory"),
    0xC00000FD: Sentence("ran out of stack space"),
    0xC0000409: _SIGNALS["SIGABRT"],
}


@dataclass(frozen=True, slots=True)
class Death:
    """The unexpected end of a process.

    Attributes:
        code: exit status, or the negated number of the signal that killed it.
        why: why the parent killed it, for example "has sent nothing for 30 s"; "" if it did not.
        log: last lines of its output.
        is_memory_short: whether the system killed processes for lack of memory since it started.
    """

    code: int
    why: str
    log: tuple[str, ...]
    is_memory_short: bool

    @property
    def manner(self) -> str:
        """How it ended, as the rest of a sentence."""
        if self.why:
            return self.why
        if self.code < 0:
            name = _signal_name(-self.code)
            manner = _SIGNALS.get(name) or Sentence("was killed")
            return Sentence("{manner} ({signal})", manner=manner, signal=name)
        manner = _WINDOWS_CODES.get(self.code & 0xFFFFFFFF) or Sentence("exited unexpectedly")
        return Sentence("{manner} (exit status {code})", manner=manner, code=self.code)


def crash_of(death: Death, doing: str) -> EngineCrashed:
    """Return an error that explains how the engine ended.

    Args:
        doing: what it was doing, for example "while answering on cuda:0".
    """
    hint = Sentence("Load the model again to continue; your chats are kept.")
    if death.is_memory_short and death.code == -_SIGKILL:
        hint = Sentence(
            "{hint} The system ran out of memory and killed programs: choose a smaller context or"
            " model, or close other programs.",
            hint=hint,
        )
    if lines := _relevant(death.log):
        hint = Sentence("{hint} Its log ends with: {log}", hint=hint, log=" | ".join(lines))
    return EngineCrashed("The engine {manner} {doing}.", hint, manner=death.manner, doing=doing)


def start_failure(error: OSError | MemoryError) -> EngineCrashed:
    """Return an error that explains why the engine's process cannot be started."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    why = os.strerror(number) if number else str(error)
    hint = Sentence("Load the model again.")
    if number in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE):
        hint = Sentence("Close other programs, then load the model again.")
    elif number in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC):
        hint = Sentence("Reinstall Tandem: its Python, {path}, cannot be run.", path=sys.executable)
    problem = Sentence(why)
    return EngineCrashed("The engine cannot be started: {problem}.", hint, problem=problem)


def stopped_hint(device: str, model: ModelLoaded | None) -> str:
    """Return the remedy for a GPU that has stopped working in the engine's process.

    Args:
        model: model that still works in that process, if any.
    """
    if model is None:
        template = "Load the model again; if this comes back, load it without {device}."
        return Sentence(template, device=device)
    template = "{model} still works; eject it to use {device} again."
    return Sentence(template, model=model.info.name, device=device)


def doing_of(command: Command | None, model: ModelLoaded | None, is_ready: bool) -> str:
    """Return what the engine is doing on which devices, as the end of a sentence.

    Args:
        command: current command, if any.
        model: the loaded model, if any.
        is_ready: whether the engine has started.
    """
    if not is_ready:
        return Sentence("while it was starting")
    if isinstance(command, Load | Resplit | Tune):
        devices = command.params.all_devices
    else:
        devices = model.params.all_devices if model is not None else ()
    activity = _activity(command)
    if not devices:
        return Sentence("while {activity}", activity=activity)
    names = ", ".join(dict.fromkeys(devices))
    return Sentence("while {activity} on {devices}", activity=activity, devices=names)


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory so far; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


_SIGKILL = 9  # Windows has no name for it


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _activity(command: Command | None) -> str:
    if isinstance(command, Load):
        return Sentence("loading {file}", file=Path(command.params.path).name)
    names: dict[type, str] = {
        AnswerRequest: Sentence("answering"),
        Resplit: Sentence("changing the split"),
        Tune: Sentence("searching for the best split"),
        SaveState: Sentence("saving the chat's cache"),
        LoadState: Sentence("loading the chat's cache"),
        Embed: Sentence("computing embeddings"),
        ScoreTokens: Sentence("scoring text"),
        Tokenize: Sentence("splitting text into tokens"),
        Detokenize: Sentence("joining tokens"),
        ApplyTemplate: Sentence("rendering a prompt"),
    }
    return names.get(type(command)) or Sentence("it was idle")


def _relevant(lines: Sequence[str]) -> list[str]:
    found = [line.strip() for line in lines if line.strip()]
    starts = [at for at, line in enumerate(found) if line.startswith(FATAL)]
    if starts:
        trace = found[starts[-1] :]
        found = trace[:1] + [line for line in trace if line.startswith("File ")][: LOG_LINES - 1]
    return [line[:MAX_LINE] for line in found[-LOG_LINES:]]


log = logging.getLogger(__name__)

LOG_KEPT = 200
"""Number of lines to keep from the end of a process's log."""

MAX_KEPT = 1000
"""Maximum number of bytes to keep per line."""

STOPPED_S = 2.0
"""Seconds without a heartbeat after which a stopped (suspended) process counts as lost."""

SILENT_S = 30.0
"""Seconds without a heartbeat after which an idle process counts as hanging."""

BUSY_S = 150.0
"""The same for a process that is computing, as a library may hold Python's lock, which prevents
heartbeats."""

BUSY_SHARE = 0.1
"""Share of a core's time above which a process counts as computing; low, as others may compute."""

END_S = 5.0
"""Seconds that a process has to exit after its connection was closed before it is killed."""

LEVELS = {
    "DEBUG": 0, "INFO": 0, "WARNING": logging.WARNING, "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}  # fmt: skip
"""Logging levels by the first word of a line in a process's log; 0 is not logged."""

TRACE_S = 1.0
"""Seconds that a hanging process has to write its stack traces before it is killed."""


class EngineProcess:
    """A child process with an engine.

    Args:
        command: command line, without the connection's handle.
        on_refused: called on a thread with a message that cannot be sent, and the error.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, command: Sequence[str], on_refused: Callable[[ToEngine, MessageError], None]
    ) -> None:
        self._oom_kills = oom_kills()
        self._on_refused = on_refused
        ours, theirs = connected_pair()
        try:
            self._process = _start(command, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        tie_child(self.pid)
        self._channel = Channel(ours, TO_ENGINE, FROM_ENGINE)
        self._log: deque[bytes] = deque(maxlen=LOG_KEPT)
        self._messages: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._why = ""
        self._cpu_s: float | None = None  # CPU time when it went silent
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read_log, "tandem-log"), (self._write, "tandem-commands"))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except (RuntimeError, MemoryError) as error:
            self.kill()
            self._process.wait()
            self._messages.put(None)
            self._channel.close()
            raise OSError(errno.ENOMEM, "there is no memory for its threads") from error

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message."""
        self._messages.put(message)

    def receive(self, timeout_s: float) -> FromEngine | None:
        """Return the next message; None after the timeout.

        Raises:
            EOFError, OSError: the process has exited.
        """
        try:
            return self._channel.receive(timeout_s)
        except MessageError as error:
            log.exception("the engine's process has sent an invalid message")
            self._why = Sentence("sent an invalid message ({problem})", problem=error.problem)
            self.kill()
            raise EOFError from error

    def check(self, silent_s: float) -> None:
        """Kill the process if it is stopped or hangs; call this after each `receive`.

        Args:
            silent_s: seconds without a message from it.
        """
        if not silent_s:
            self._cpu_s = None
            return
        if self._cpu_s is None:
            self._cpu_s = self._used_s()
        if silent_s >= STOPPED_S and self._is_stopped():
            self._why = Sentence("was stopped by another program")
            self.kill()
        elif silent_s >= SILENT_S:
            used_s = self._used_s() - self._cpu_s
            if used_s > BUSY_SHARE * silent_s and silent_s < BUSY_S:
                return
            self._why = Sentence("has shown no sign of life for {n:.0f} s", n=silent_s)
            with suppress(OSError, ValueError):  # Windows has no such signal
                self._process.send_signal(signal.SIGABRT)  # writes stack traces
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TRACE_S)
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        with suppress(OSError):
            self._process.kill()

    def bury(self) -> Death:
        """Wait for the process to end, or kill it; return how it ended."""
        self._messages.put(None)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        for thread in self._threads:
            thread.join(1)  # the log stays open while another process has its handle
        self._channel.close()
        lines = tuple(line.decode(errors="replace").rstrip() for line in list(self._log))
        return Death(code, self._why, lines, oom_kills() > self._oom_kills)

    def _used_s(self) -> float:
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _is_stopped(self) -> bool:
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        level = 0
        with self._process.stderr as stream, suppress(OSError, ValueError):
            while line := stream.readline(MAX_KEPT):
                self._log.append(line)
                text = line.decode(errors="replace").rstrip()
                level = level_of(text, level)
                if level:
                    log.log(level, "%s", text)

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._channel.send(message)
            except MessageError as error:
                self._on_refused(message, error)
            except OSError:  # it has exited, which the reader also notices
                return


def level_of(line: str, before: int) -> int:
    """Return the level at which to log a line from a process's log; 0 to skip it.

    Args:
        before: level of the previous line, which also applies to lines without one (tracebacks).
    """
    first = line.partition(" ")[0]
    if first in LEVELS:
        return LEVELS[first]
    return 0 if line.startswith(FATAL) else before


def _start(command: Sequence[str], connection: Connection) -> subprocess.Popen[bytes]:
    """Start a process that inherits a connection and no other handles."""
    handle = connection.fileno()
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        os.set_handle_inheritable(handle, True)
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        options = {"startupinfo": startup, "creationflags": NO_WINDOW}
    else:
        options = {"pass_fds": (handle,)}
    return subprocess.Popen(
        [*command, str(handle), str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=child_environment(), **options,
    )  # fmt: skip
