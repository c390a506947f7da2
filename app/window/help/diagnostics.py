"""Diagnostics for bug reports, without private data.

Chats are never logged. In addition, a report omits quoted texts, exception messages, folders, the
names of the user and the computer, tokens, and texts given by the caller.
"""

from __future__ import annotations

import getpass
import platform
import re
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import PySide6
from PySide6.QtCore import QLibraryInfo, qVersion

from app.core.settings import Settings, shown_settings
from app.core.translation import tr
from app.core.units import size_text
from app.window.help.licences import (
    FONT_VERSION,
    PACKAGE,
    PYTHON_TEXTS,
    QT_TEXTS,
    ROOT,
    TEXTS,
    Component,
    packages,
)
from engine import DeviceInfo, package_version

N_LINES: Final = 200
"""Maximum number of log lines in a report."""

MIN_PRIVATE: Final = 3
"""Minimum length of a private word to remove, as shorter ones occur inside other words."""

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
"""Patterns to replace in a log line, and their replacements."""

QUOTED_FILE = re.compile(r'File "(?:[^"\n]*[\\/])?([^"\\/\n]+)", line')
"""Pattern for a file in a traceback; only its name is kept."""


def report(
    versions: Sequence[tuple[str, str]],
    devices: Sequence[DeviceInfo],
    settings: Settings,
    log_lines: Sequence[str],
    private: Collection[str] = (),
) -> str:
    """Return a report without `private` texts, for example chat titles."""
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
    """Return log lines without private data."""
    names = sorted({*private, *_names()}, key=len, reverse=True)
    words = [re.escape(name) for name in names if len(name.strip()) >= MIN_PRIVATE]
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
    found = {platform.node(), platform.node().partition(".")[0]}
    try:
        found |= {getpass.getuser(), Path.home().name, str(Path.home())}
    except (OSError, KeyError, RuntimeError):  # the user has no name or home folder
        return found
    return found - {"root", "/root", "localhost"}  # not private


def _device_line(device: DeviceInfo) -> str:
    facts = [device.name, size_text(device.total_bytes)]
    facts += [text for text in (device.compute_capability, device.arch, device.driver) if text]
    facts += [] if device.usable else [f"not usable: {device.reason}"]
    return f"{device.id}: {', '.join(facts)}"


def _setting_lines(settings: Settings) -> list[str]:
    # changed settings on the settings page; texts are reduced to their lengths
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


def versions(devices: Sequence[DeviceInfo]) -> list[tuple[str, str]]:
    """Return pairs of name and version; call it on a thread."""
    drivers = {device.driver for device in devices if device.driver}
    return [
        ("Tandem", package_version() or tr("source tree")),
        ("Python", platform.python_version()),
        ("Qt", f"{qVersion()} (PySide6 {PySide6.__version__})"),
        ("PyTorch", _version_of("torch")),
        ("Triton", _version_of("triton") or _version_of("triton-windows")),
        (tr("GPU driver"), ", ".join(sorted(drivers)) or tr("none")),
        (tr("System"), f"{platform.system()} {platform.release()} ({platform.machine()})"),
    ]


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return tr("not installed") if name == "torch" else ""


QT_SOURCES = "https://download.qt.io/official_releases/qt/"
PYSIDE_SOURCES = "https://code.qt.io/cgit/pyside/pyside-setup.git/"


def all_components() -> list[Component]:
    """Return all components of Tandem; call it on a thread."""
    return [_tandem(), _qt(), _python(), _font(), *_system_libraries(), *packages()]


def _tandem() -> Component:
    notice = tr("Tandem with its icons and its demo model.")
    files = (
        ROOT / "LICENSE",
        *sorted(ROOT.glob(f"{PACKAGE.replace('-', '_')}-*/licenses/LICENSE")),
    )
    return Component("Tandem", package_version(), "MIT", _present(files)[:1], notice)


def _qt() -> Component:
    version = qVersion() or ""
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.LibrariesPath)
    notice = "\n\n".join(
        (
            tr(
                "Tandem uses Qt {version} and Qt for Python under the GNU Lesser General Public"
                " License, version 3, which is included below with the GNU General Public License"
                " that it refers to. Qt is © The Qt Company Ltd. and other contributors."
            ).format(version=version),
            tr(
                "Qt is linked dynamically: its libraries are separate, unmodified files in"
                " {folder}."
            ).format(folder=folder),
            tr(
                "You may replace them with your own build of Qt: close Tandem, replace these files"
                " with libraries of Qt {version} or a compatible version under the same names, and"
                " restart Tandem. QT_PLUGIN_PATH sets a folder with other plugins. You may reverse"
                " engineer Tandem as far as needed to debug such modifications."
            ).format(version=version),
            tr(
                "The source code of Qt is available at {qt}, that of Qt for Python at {pyside},"
                " each in the version named here."
            ).format(qt=QT_SOURCES, pyside=PYSIDE_SOURCES),
        )
    )
    return Component("Qt", version, "LGPL-3.0-only", _kept(QT_TEXTS), notice)


def _python() -> Component:
    library = Path(sysconfig.get_path("stdlib"))
    prefix = Path(sys.base_prefix)
    debian = Path(f"/usr/share/doc/python{sys.version_info.major}.{sys.version_info.minor}")
    own = _present((library / "LICENSE.txt", prefix / "LICENSE.txt", debian / "copyright"))[:1]
    files = (*own, *_kept(PYTHON_TEXTS))
    return Component("Python", platform.python_version(), "PSF-2.0", files)


def _font() -> Component:
    files = _present((ROOT / "resources" / "fonts" / "OFL.txt",))
    return Component("Inter", FONT_VERSION, "OFL-1.1", files)


def _system_libraries() -> list[Component]:
    files = tuple(sorted((ROOT.parent / "lib" / "licences").glob("*.txt")))
    if not files:
        return []
    names = ", ".join(file.stem for file in files)
    return [Component(tr("System libraries"), "", tr("see the texts"), files, names)]


def _kept(names: tuple[str, ...]) -> tuple[Path, ...]:
    return _present(tuple(TEXTS / f"{name}.txt" for name in names))


def _present(files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(file for file in files if file.is_file())
