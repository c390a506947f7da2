"""How the engine's process ended, in words."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineCrashed
from engine.events import (
    Command,
    Generate,
    Load,
    LoadState,
    ModelLoaded,
    Resplit,
    SaveState,
    Tune,
)
from engine.generation.queries.questions import (
    ApplyTemplate,
    Detokenize,
    Embed,
    ScoreTokens,
    Tokenize,
)

LOG_LINES = 3
"""Number of lines from the end of the process's log that are shown to a person."""

LONGEST_LINE = 120
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
        Generate: "answering",
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
    return [line[:LONGEST_LINE] for line in found[-LOG_LINES:]]
