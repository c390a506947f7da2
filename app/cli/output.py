"""The output of the command line: tables for people, one JSON document for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from app.units import GIB, MIB
from engine import EngineError, Fallback


def prepare_streams() -> None:
    """Make the standard streams able to carry any text.

    What the terminal's encoding cannot express is replaced, and so is input that is not in that
    encoding; a stream that the caller has closed leads nowhere.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 stays open


def write(text: str = "", end: str = "\n") -> None:
    """Write to stdout at once, so that streamed text appears as it comes."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """Write to stderr: progress, warnings and errors, never results."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def note_error(error: EngineError) -> None:
    """Write an error and its hint to stderr, in one line."""
    note(" ".join(f"{error} {error.hint}".split()))


def write_json(document: Any) -> None:
    """Write the JSON document of a `--json` run; dataclasses become objects."""
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    write(json.dumps(document, default=_plain, ensure_ascii=not is_utf8, indent=2))


def fallback_fields(fallbacks: Iterable[Fallback]) -> list[dict[str, Any]]:
    """Return what made GPUs slower than they could be as the objects of `--json`."""
    return [{**asdict(fallback), "sentence": fallback.sentence} for fallback in fallbacks]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Return a table with columns as wide as their widest cell, those in `right` right-aligned.

    Control characters, which names from a file may hold, are replaced: a terminal would obey them.
    """
    lines = [[_printable(cell) for cell in line] for line in (headers, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]

    def cell(text: str, index: int) -> str:
        return text.rjust(widths[index]) if index in right else text.ljust(widths[index])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def size(n_bytes: int) -> str:
    """Return bytes with their unit: "1.50 GiB", "12.30 MiB"."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"
