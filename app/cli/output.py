"""Command-line output: tables for people, JSON for programs."""

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
    Sentence,
    error_line,
    json_escaped,
    one_line,
    package_version,
    printable,
)

CLEAR_LINE: Final = "\r\x1b[K"  # escape sequence that clears the terminal's line
MAX_PROGRESS: Final = 200  # maximum length of a progress line, in characters


def prepare_streams() -> None:
    """Make the standard streams accept any text, and log warnings to stderr.

    Characters that a stream cannot encode are replaced. Closed streams are replaced with the null
    device.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    logging.lastResort = LogLines(logging.WARNING)


class OutputError(EngineError):
    """Results cannot be written, e.g. to a full disk."""


def write(text: str = "", end: str = "\n") -> None:
    """Write to stdout and flush, without control characters if it is a terminal.

    Raises:
        BrokenPipeError: the reader closed the pipe.
        OutputError: writing failed for another reason, for example a full disk.
    """
    try:
        sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + end)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        problem = Sentence(error.strerror or str(error))
        raise OutputError("The output cannot be written: {problem}.", problem=problem) from None


def finish_output() -> None:
    """Flush buffered output, e.g. a parser's help, while errors can still be reported."""
    if sys.stdout is not None:
        write(end="")


def note(text: str) -> None:
    """Write a line to stderr, without control characters."""
    _write_error(printable(text) + "\n")


def note_progress(text: str = "") -> None:
    """Show a progress line on a terminal, replacing the previous one."""
    if sys.stderr.isatty():
        line = " ".join(printable(text).splitlines())
        _write_error(f"{CLEAR_LINE}{line[:MAX_PROGRESS]}")


def note_error(error: EngineError) -> None:
    """Write an error and its hint to stderr on one line."""
    note(error_line(str(error), error.hint))


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Redirect a broken stream to the null device, so that flushing it at exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class CommandParser(argparse.ArgumentParser):
    """Argument parser whose error messages are single printable lines."""

    def error(self, message: str) -> NoReturn:
        super().error(error_line(message))


class LogLines(logging.Handler):
    """Log handler that writes to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def write_json(document: Any) -> None:
    """Write a JSON document; dataclasses become objects."""
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    text = json.dumps(document, default=_plain, ensure_ascii=not is_utf8, indent=2)
    write(json_escaped(text))


def fallback_fields(fallbacks: Iterable[Fallback]) -> list[dict[str, Any]]:
    """Return fallbacks as JSON-ready dictionaries."""
    return [{**asdict(fallback), "sentence": fallback.sentence} for fallback in fallbacks]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Return a table with one line per row; `right` contains the right-aligned columns."""
    lines = [[one_line(cell) for cell in line] for line in (headers, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]

    def cell(text: str, index: int) -> str:
        return text.rjust(widths[index]) if index in right else text.ljust(widths[index])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def size(n_bytes: int) -> str:
    """Return a size such as "1.50 GiB" or "12.30 MiB"."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def remedy_here(command: str) -> str:
    """Return a remedy; pip commands become `tandem engine` if the engine comes from a pack."""
    return "tandem engine" if command.startswith("pip ") and not has_own_engine() else command


PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Return the version of the installed package or the source tree."""
    return package_version() or _source_version()


def _source_version() -> str:
    import tomllib  # imported late, since installed packages do not need it

    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return str(project["version"])
