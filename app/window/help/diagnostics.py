"""What a report of a mistake needs, without anything private.

Chats are never logged. What may still stand in a log is taken out here: texts in quotes, the words
of exceptions, folders, names of the user and the computer, tokens, and what the caller knows to be
private.
"""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from app.core.settings import Settings, shown_settings
from app.core.units import size_text
from engine import DeviceInfo

N_LINES: Final = 200
"""Number of the last lines of the log in a report."""

LEAST_PRIVATE: Final = 3
"""Length of the shortest private word that is taken out; shorter ones are parts of other words."""

PRIVATE: Final = "<private>"

RULES: Final = (
    (
        re.compile(
            r"(?i)\b(bearer|token|authorization|password|api[-_ ]?key)\b\W{0,3}(?:bearer\s+)?\S+"
        ),
        r"\1 <token>",
    ),
    (re.compile(r"\b(hf|sk|ghp|gho|github_pat|xox[a-z])[-_][A-Za-z0-9_-]{8,}"), "<token>"),
    (re.compile(r"\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{32,}\b"), "<token>"),
    (re.compile(r"(https?://)(?:[^/\s@]*@)?([^/\s?#]+)[^\s]*"), r"\1\2/…"),
    (re.compile(r"\b(\w*(?:Error|Exception|Warning|Interrupt|Exit))\b: [^\n)]*"), r"\1"),
    (re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|‘[^’\n]*’|(?<!\w)'[^'\n]*'(?!\w)"), "“…”"),
    (re.compile(r"\b[A-Za-z]:[\\/](?:[^\s\\/:][^\\/:\n]*[\\/])*"), "…/"),
    (re.compile(r"(?<![\w.:…/\\])[\\/](?:[^\s\\/:][^\\/:\n]*[\\/])+"), "…/"),
)  # fmt: skip
"""What is taken out of a line, and what comes in its place."""

QUOTED_FILE = re.compile(r'File "(?:[^"\n]*[\\/])?([^"\\/\n]+)", line')
"""A line of a traceback, of which the file's name stays."""


def report(
    versions: Sequence[tuple[str, str]],
    devices: Sequence[DeviceInfo],
    settings: Settings,
    log_lines: Sequence[str],
    private: Collection[str] = (),
) -> str:
    """Return the whole report as text.

    Args:
        private: texts that must not be in it, such as titles of chats.
    """
    parts = [
        "# Tandem diagnostics",
        *(f"{name}: {version}" for name, version in versions),
        "",
        "## Devices",
        *(_device_line(device) for device in devices),
        "",
        "## Settings that differ from the default",
        *(_setting_lines(settings) or ["none"]),
        "",
        "## Log",
        *scrubbed(log_lines[-N_LINES:], private),
    ]
    return "\n".join(parts) + "\n"


def scrubbed(lines: Sequence[str], private: Collection[str] = ()) -> list[str]:
    """Return lines of a log without what may be private."""
    names = sorted({*private, *_names()}, key=len, reverse=True)
    words = [re.escape(name) for name in names if len(name.strip()) >= LEAST_PRIVATE]
    known = re.compile("|".join(words), re.IGNORECASE) if words else None
    return [_scrubbed_line(line, known) for line in lines]


def _scrubbed_line(line: str, known: re.Pattern[str] | None) -> str:
    if known is not None:
        line = known.sub(PRIVATE, line)
    line = QUOTED_FILE.sub(r"File \1 line", line)
    for pattern, replacement in RULES:
        line = pattern.sub(replacement, line)
    return line


def _names() -> set[str]:
    """Return the names of the user, the home folder and the computer."""
    found = {platform.node(), platform.node().partition(".")[0]}
    try:
        found |= {getpass.getuser(), Path.home().name, str(Path.home())}
    except (OSError, KeyError, RuntimeError):  # a user without a name or a home
        return found
    return found - {"root", "/root", "localhost"}  # nobody's names


def _device_line(device: DeviceInfo) -> str:
    facts = [device.name, size_text(device.total_bytes)]
    facts += [text for text in (device.compute_capability, device.arch, device.driver) if text]
    facts += [] if device.usable else [f"not usable: {device.reason}"]
    return f"{device.id}: {', '.join(facts)}"


def _setting_lines(settings: Settings) -> list[str]:
    """Return the settings of the page that people have changed; of texts only their length."""
    default = Settings()
    changed = {
        name: getattr(settings, name)
        for name in (*shown_settings(), "sampling")
        if getattr(settings, name) != getattr(default, name)
    }
    return [f"{name}: {_bare(name, value)}" for name, value in changed.items()]


def _bare(name: str, value: object) -> str:
    if isinstance(value, bool | int | float):
        return str(value)
    shown = shown_settings().get(name)
    if isinstance(value, str):
        is_choice = shown is not None and value in shown.choices
        return value if is_choice else f"<{len(value)} characters>"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_bare('', one)}" for key, one in value.items())
    return f"<{len(_items(value))} entries>"


def _items(value: Any) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()
