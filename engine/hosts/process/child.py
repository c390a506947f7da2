"""The engine's process as its parent sees it: started, followed, ended."""

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

from engine.errors import EngineCrashed
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
"""Number of lines from the end of the process's log that are shown to a person."""

MAX_LINE = 120
"""Largest number of characters of such a line."""

FATAL = "Fatal Python error"
"""Start of the line before the trace that `faulthandler` writes at a crash."""

_SIGNALS = {
    "SIGKILL": "was killed",
    "SIGTERM": "was told to end by another program",
    "SIGSEGV": "crashed at an invalid memory address",
    "SIGBUS": "crashed reading memory or a file that is gone",
    "SIGILL": "crashed at an instruction that this processor lacks",
    "SIGFPE": "crashed at an invalid calculation",
    "SIGABRT": "gave up after an internal error",
}

_WINDOWS_CODES = {
    0xC0000005: "crashed at an invalid memory address",
    0xC000001D: "crashed at an instruction that this processor lacks",
    0xC0000017: "ran out of memory",
    0xC00000FD: "ran out of stack memory",
    0xC0000409: "gave up after an internal error",
}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that nobody asked for.

    Attributes:
        code: exit status; minus the number of the signal that ended it.
        why: why it was ended by the window, such as "has sent nothing for 30 s"; "" if it was not.
        log: last lines of what it wrote.
        is_memory_short: whether the system has killed processes for lack of memory meanwhile.
    """

    code: int
    why: str
    log: tuple[str, ...]
    is_memory_short: bool

    @property
    def manner(self) -> str:
        """What became of it, as the rest of a sentence."""
        if self.why:
            return self.why
        if self.code < 0:
            name = _signal_name(-self.code)
            return f"{_SIGNALS.get(name, 'was ended')} ({name})"
        known = _WINDOWS_CODES.get(self.code & 0xFFFFFFFF)
        return f"{known or 'ended by itself'} (exit status {self.code})"


def crash_of(death: Death, doing: str) -> EngineCrashed:
    """Return the error that says how the engine ended.

    Args:
        doing: what it was doing, such as "while answering on cuda:0".
    """
    hints = ["Load the model again to go on; your chats are kept."]
    if death.is_memory_short and death.code == -_SIGKILL:
        hints.append(
            "The system had run out of memory and ended programs: choose a smaller context or"
            " model, or close other programs."
        )
    if lines := _telling(death.log):
        hints.append(f"Its log ends with: {' | '.join(lines)}")
    return EngineCrashed(f"The engine {death.manner} {doing}.", " ".join(hints))


def start_failure(error: OSError | MemoryError) -> EngineCrashed:
    """Return the error that says why the engine's process cannot be started."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    why = os.strerror(number) if number else str(error)
    hint = "Load the model again."
    if number in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE):
        hint = "Close other programs, then load the model again."
    elif number in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC):
        hint = f"Install Tandem again: its Python, {sys.executable}, cannot be run."
    return EngineCrashed(f"The engine cannot be started: {why[:1].lower()}{why[1:]}.", hint)


def stopped_hint(device: str, model: ModelLoaded | None) -> str:
    """Return what to do about a GPU that has stopped working in the engine's process.

    Args:
        model: the model that is left there, if any.
    """
    if model is None:
        return f"Load the model again; if this comes back, load it without {device}."
    return f"{model.info.name} still answers; eject it to use {device} again."


def doing_of(command: Command | None, model: ModelLoaded | None, is_ready: bool) -> str:
    """Return what the engine was doing, and on which devices.

    Args:
        command: command under way; None if there is none.
        model: the loaded model, if any.
        is_ready: whether the engine has started.
    """
    if not is_ready:
        return "while it was starting"
    if isinstance(command, Load | Resplit | Tune):
        devices = command.params.all_devices
    else:
        devices = model.params.all_devices if model is not None else ()
    where = f" on {', '.join(dict.fromkeys(devices))}" if devices else ""
    return f"while {_activity(command)}{where}"


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory; 0 where that is unknown."""
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
        return f"loading {Path(command.params.path).name}"
    names: dict[type, str] = {
        AnswerRequest: "answering",
        Resplit: "changing the split",
        Tune: "searching for the best split",
        SaveState: "saving the chat's cache",
        LoadState: "loading the chat's cache",
        Embed: "computing embeddings",
        ScoreTokens: "scoring a text",
        Tokenize: "splitting a text into tokens",
        Detokenize: "joining tokens",
        ApplyTemplate: "writing a prompt",
    }
    return names.get(type(command), "it was idle")


def _telling(lines: Sequence[str]) -> list[str]:
    """Return the lines of a log that tell most: where Python was at a crash, else the last ones."""
    found = [line.strip() for line in lines if line.strip()]
    starts = [at for at, line in enumerate(found) if line.startswith(FATAL)]
    if starts:
        trace = found[starts[-1] :]
        found = trace[:1] + [line for line in trace if line.startswith("File ")][: LOG_LINES - 1]
    return [line[:MAX_LINE] for line in found[-LOG_LINES:]]


log = logging.getLogger(__name__)

LOG_KEPT = 200
"""Number of the last lines of a process's log that are kept."""

MAX_KEPT = 1000
"""Largest number of bytes that are kept of one line."""

STOPPED_S = 2.0
"""Seconds without a heartbeat after which a process that was stopped counts as lost."""

SILENT_S = 30.0
"""Seconds without a heartbeat after which a process that does nothing counts as hanging."""

BUSY_S = 150.0
"""The same for a process that computes: a library may hold the interpreter's lock meanwhile, so
that nothing in the process can send a heartbeat."""

BUSY_SHARE = 0.1
"""Share of one core that a process must have used for that, on a machine that may be overloaded."""

END_S = 5.0
"""Seconds that a process may take to end after its connection was closed; then it is killed."""

LEVELS = {
    "DEBUG": 0, "INFO": 0, "WARNING": logging.WARNING, "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}  # fmt: skip
"""Levels of logging by the word that a line of a process's log begins with; 0 where it is only
kept for its end."""

TRACE_S = 1.0
"""Seconds that a hanging process gets to write where its threads are, before it is killed."""


class EngineProcess:
    """A child process with an engine.

    Args:
        command: command line, without the handle of the connection.
        on_refused: called on a thread with a message that cannot be sent, and why.

    Raises:
        OSError: it cannot be started.
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
        self._cpu_s: float | None = None  # processor time when it fell silent
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
        """Send a message as soon as the process takes it; return at once."""
        self._messages.put(message)

    def receive(self, timeout_s: float) -> FromEngine | None:
        """Return the next message; None if there is none within the time.

        Raises:
            EOFError, OSError: the process has ended.
        """
        try:
            return self._channel.receive(timeout_s)
        except MessageError as error:
            log.exception("the engine's process has sent nonsense")
            self._why = f"sent something wrong ({error.problem})"
            self.kill()
            raise EOFError from error

    def check(self, silent_s: float) -> None:
        """End the process if it is stopped or hangs; to be called after each wait for a message.

        Args:
            silent_s: seconds without a message from it.
        """
        if not silent_s:
            self._cpu_s = None
            return
        if self._cpu_s is None:
            self._cpu_s = self._used_s()
        if silent_s >= STOPPED_S and self._is_stopped():
            self._why = "was stopped by another program"
            self.kill()
        elif silent_s >= SILENT_S:
            used_s = self._used_s() - self._cpu_s
            if used_s > BUSY_SHARE * silent_s and silent_s < BUSY_S:
                return
            self._why = f"has shown no sign of life for {silent_s:.0f} s"
            with suppress(OSError, ValueError):  # Windows knows no such signal
                self._process.send_signal(signal.SIGABRT)  # writes where each thread is
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TRACE_S)
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        with suppress(OSError):
            self._process.kill()

    def bury(self) -> Death:
        """Wait until the process has ended, or end it; return how it did."""
        self._messages.put(None)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        for thread in self._threads:
            thread.join(1)  # the log stays open while another process has it
        self._channel.close()
        lines = tuple(line.decode(errors="replace").rstrip() for line in list(self._log))
        return Death(code, self._why, lines, oom_kills() > self._oom_kills)

    def _used_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 if it is gone."""
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _is_stopped(self) -> bool:
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def _read_log(self) -> None:
        """Keep the last lines that the process writes to its error output; runs on a thread."""
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
        """Send messages in order; runs on a thread, as sending waits while the process is busy."""
        while (message := self._messages.get()) is not None:
            try:
                self._channel.send(message)
            except MessageError as error:
                self._on_refused(message, error)
            except OSError:  # it has ended, which the reader finds, too
                return


def level_of(line: str, before: int) -> int:
    """Return the level at which a line of a process's log is worth logging here; 0 is none.

    Args:
        before: level of the line before, which a line without one, as of a traceback, belongs to.
    """
    first = line.partition(" ")[0]
    if first in LEVELS:
        return LEVELS[first]
    return 0 if line.startswith(FATAL) else before


def _start(command: Sequence[str], connection: Connection) -> subprocess.Popen[bytes]:
    """Start a process that inherits a connection, and nothing else that is open."""
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
