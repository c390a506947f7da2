"""The output of the command line: tables for people, one JSON document for programs."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from app.core.units import GIB, MIB
from app.setup.engine_pack.activation import has_own_engine
from engine import (
    EngineError,
    Fallback,
    error_line,
    json_escaped,
    one_line,
    package_version,
    printable,
)

CLEAR_LINE: Final = "\r\x1b[K"
"""Sequence with which a terminal goes to the start of its line and clears it."""

MAX_PROGRESS: Final = 200
"""Largest number of characters of a line of progress."""


def prepare_streams() -> None:
    """Make the standard streams able to carry any text.

    What the terminal's encoding cannot express is replaced, and so is input that is not in that
    encoding; a stream that the caller has closed leads nowhere. What modules log goes to stderr.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 stays open
    logging.lastResort = LogLines(logging.WARNING)


class OutputError(EngineError):
    """Error of results that cannot be written, such as to a full disk."""


def write(text: str = "", end: str = "\n") -> None:
    """Write to stdout at once, so that streamed text appears as it comes.

    A terminal gets no characters that it would obey; files and other programs get all of them.

    Raises:
        BrokenPipeError: the reader has gone.
        OutputError: the disk is full, or the like.
    """
    try:
        sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + end)
        sys.stdout.flush()
    except OSError as error:
        _lead_nowhere(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        reason = error.strerror or str(error)
        raise OutputError(f"The output cannot be written: {reason}.") from None


def finish_output() -> None:
    """Write what is still buffered, such as a parser's help; raises what `write` raises.

    The interpreter would do it after the last chance to say in one line that it failed.
    """
    if sys.stdout is not None:
        write(end="")


def note(text: str) -> None:
    """Write warnings and remarks to stderr, without characters that a terminal obeys."""
    _write_error(printable(text) + "\n")


def note_progress(text: str = "") -> None:
    """Show what is going on in the last line of a terminal, in place of what was there."""
    if sys.stderr.isatty():
        line = " ".join(printable(text).splitlines())
        _write_error(f"{CLEAR_LINE}{line[:MAX_PROGRESS]}")


def note_error(error: EngineError) -> None:
    """Write an error and its hint to stderr, in one line."""
    note(error_line(str(error), error.hint))


def _write_error(text: str) -> None:
    """Write to stderr; nobody can hear of a failure."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _lead_nowhere(sys.stderr)


def _lead_nowhere(stream: TextIO) -> None:
    """Drop all that a stream has buffered and will get, so that it does not fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are printable lines, though they name what was given."""

    def error(self, message: str) -> NoReturn:
        super().error(error_line(message))


class LogLines(logging.Handler):
    """Handler that writes what modules log as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def write_json(document: Any) -> None:
    """Write the JSON document of a `--json` run; dataclasses become objects."""
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    text = json.dumps(document, default=_plain, ensure_ascii=not is_utf8, indent=2)
    write(json_escaped(text))


def fallback_fields(fallbacks: Iterable[Fallback]) -> list[dict[str, Any]]:
    """Return what made GPUs slower than they could be as the objects of `--json`."""
    return [{**asdict(fallback), "sentence": fallback.sentence} for fallback in fallbacks]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Return a table with columns as wide as their widest cell, those in `right` right-aligned.

    Names from a file may hold line breaks and control characters: each cell is one printable line.
    """
    lines = [[one_line(cell) for cell in line] for line in (headers, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]

    def cell(text: str, index: int) -> str:
        return text.rjust(widths[index]) if index in right else text.ljust(widths[index])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def size(n_bytes: int) -> str:
    """Return bytes with their unit: "1.50 GiB", "12.30 MiB"."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


OF_PIP = "pip "


def remedy_here(command: str) -> str:
    """Return what to run in place of a command of pip's where an engine pack has PyTorch."""
    return "tandem engine" if command.startswith(OF_PIP) and not has_own_engine() else command


PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Return the version of the installed package, or that of the source tree if there is none."""
    return package_version() or _source_version()


def _source_version() -> str:
    import tomllib  # late: an installed package does not need it

    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return str(project["version"])
