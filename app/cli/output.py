"""What the command line writes: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

GIB = 1 << 30
MIB = 1 << 20


def write(text: str = "", end: str = "\n") -> None:
    """Write to stdout at once, so that streamed text appears as it comes."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """Write to stderr: progress, warnings and errors, never results."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def write_json(document: Any) -> None:
    """The one JSON document of a `--json` run; dataclasses become objects."""
    write(json.dumps(document, default=_plain, ensure_ascii=False, indent=2))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Columns as wide as their widest cell; those in `right` are aligned to the right."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]

    def cell(text: str, index: int) -> str:
        return text.rjust(widths[index]) if index in right else text.ljust(widths[index])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def size(n_bytes: int) -> str:
    """Bytes with a unit: "1.5 GiB", "12.3 MiB"."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"
