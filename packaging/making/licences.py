"""The licences of all that a tree holds: checked, as one text, and as Debian's copyright file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from making.project import ROOT, Project

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from app.window.help.licences import (
    FONT_VERSION,
    PYTHON_TEXTS,
    QT_TEXTS,
    TEXTS,
    licence_name,
    package_text,
    plain_name,
)

OWN_HEAD = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
COMMON = (
    (
        re.compile(
            r"Apache License\s+Version 2\.0, January 2004.*?any such warranty or additional\s+"
            r"liability\.(?:\s*END OF TERMS AND CONDITIONS)?",
            re.S,
        ),
        "Apache License 2.0: see /usr/share/common-licenses/Apache-2.0.",
    ),
    (
        re.compile(
            r"GNU GENERAL PUBLIC LICENSE\s+Version 3, 29 June 2007.*?END OF TERMS AND CONDITIONS",
            re.S,
        ),
        "GNU General Public License 3: see /usr/share/common-licenses/GPL-3.",
    ),
    (
        re.compile(
            r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 3, 29 June 2007.*?choose that version for"
            r" the\s+Library\.",
            re.S,
        ),
        "GNU Lesser General Public License 3: see /usr/share/common-licenses/LGPL-3.",
    ),
)
"""Texts that every Debian has, and what stands for them in its copyright files."""

HOLDER = re.compile(r"^[\s#*/.]*((?:copyright|©|\(c\)).*\d{4}.*)$", re.IGNORECASE | re.MULTILINE)
SIGN = re.compile(r"^(?:copyright|©|\(c\)|:|\s)+", re.IGNORECASE)
PYTHON_LICENCES = ("lib/python3.*/LICENSE.txt", "LICENSE.txt", "LICENSE")
"""Where a Python has its licence, on Unix and on Windows."""

MAX_HOLDERS = 12
OWNERS = {
    "Python": "2001 Python Software Foundation; of its libraries others, see the text",
    "Qt": "The Qt Company Ltd. and other contributors; of its libraries others, see the text",
    "PySide6_Essentials": "The Qt Company Ltd. and other contributors",
    "shiboken6": "The Qt Company Ltd. and other contributors",
    "tokenizers": "The Hugging Face team",
}
"""Holders of the copyright of parts whose texts do not begin with it."""

MIN_TEXT = 100
"""Smallest number of characters that can be the text of a licence."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tree that has a licence of its own.

    Attributes:
        licence: name of its licence, SPDX where it says so itself.
        text: texts of its licences.
        files: patterns of its files, in the tree.
        package: its metadata; None for what is no Python package.
    """

    name: str
    version: str
    licence: str
    text: str
    files: tuple[str, ...]
    package: Distribution | None = None


def shipped_parts(tree: Path, project: Project) -> list[Part]:
    """Return all parts of a tree, Tandem first."""
    return [*_other_parts(tree, project), *package_parts(tree / "site")]


def package_parts(site: Path) -> list[Part]:
    """Return the Python packages in a folder, by name."""
    found = sorted(distributions(path=[str(site)]), key=lambda one: plain_name(one.name))
    return [
        Part(one.name, one.version, licence_name(one.metadata), package_text(one), _tops(one), one)
        for one in found
    ]


def check_parts(parts: Iterable[Part]) -> None:
    """Refuse parts whose licence has no name or no text.

    Raises:
        SystemExit: there is one.
    """
    nameless = [part.name for part in parts if part.licence in ("", "UNKNOWN", "not stated")]
    textless = [part.name for part in parts if len(part.text) < MIN_TEXT]
    if nameless or textless:
        raise SystemExit(
            f"No name of a licence: {', '.join(nameless) or 'none'}. No text: "
            f"{', '.join(textless) or 'none'}. licences.py says where texts are added."
        )


def licences_text(parts: Iterable[Part]) -> str:
    """Return all licences as one text to read."""
    parts = list(parts)
    lines = [
        "Tandem and the parts that come with it, each under its own licence.", "",
        *(f"  {part.name} {part.version}: {part.licence}" for part in parts),
    ]  # fmt: skip
    for part in parts:
        lines += [
            "",
            "=" * 80,
            f"{part.name} {part.version}: {part.licence}",
            "=" * 80,
            "",
            part.text,
        ]
    return "\n".join(lines) + "\n"


def copyright_file(parts: Iterable[Part], home: str = "usr/lib/tandem") -> str:
    """Return Debian's copyright file (DEP-5) of a package that has a tree in a folder."""
    sections = [f"{OWN_HEAD}\nUpstream-Name: Tandem\nUpstream-Contact: The Tandem authors"]
    for part in parts:
        files = "\n ".join(f"{home}/{pattern}" if pattern != "*" else "*" for pattern in part.files)
        text = part.text
        for pattern, pointer in COMMON:
            text = pattern.sub(pointer, text)
        known = OWNERS.get(part.name)
        holders = _folded([known] if known else _holders(part.text) or ["see the text"])
        fields = (
            f"Files: {files}", f"Copyright: {holders}",
            f"License: {_short(part.licence)}\n{_folded(text.splitlines(), 1)}",
            f"Comment: {part.name} {part.version}".rstrip(),
        )  # fmt: skip
        sections.append("\n".join(fields))
    return "\n\n".join(sections) + "\n"


def _other_parts(tree: Path, project: Project) -> list[Part]:
    """Return what is no package of others: Tandem, Python, Qt, and the font."""
    home = tree / "python"
    library = next((path for name in PYTHON_LICENCES for path in home.glob(name)), None)
    version = next(home.glob("include/**/patchlevel.h"), None)
    fonts = ROOT / "resources" / "fonts"
    python = [library.read_text(encoding="utf-8")] if library else []
    qt = next((p for p in package_parts(tree / "site") if p.name.startswith("PySide6")), None)
    return [
        Part("Tandem", project.version, "MIT", _texts([ROOT / "LICENSE"]), ("*",)),
        Part(
            "Python", _python_version(version), "PSF-2.0",
            "\n\n".join([*python, _texts(TEXTS / f"{name}.txt" for name in PYTHON_TEXTS)]) if python
            else "", ("python/*",),
        ),
        Part(
            "Qt", qt.version if qt else "", "LGPL-3.0-only",
            _texts(TEXTS / f"{name}.txt" for name in QT_TEXTS), ("site/PySide6/*",),
        ),
        Part(
            "Inter", FONT_VERSION, "OFL-1.1", _texts([fonts / "OFL.txt"]),
            (f"src/{fonts.relative_to(ROOT).as_posix()}/*",),
        ),
    ]  # fmt: skip


def _python_version(header: Path | None) -> str:
    found = header and re.search(r'PY_VERSION\s+"([^"]+)"', header.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _texts(paths: Iterable[Path]) -> str:
    return "\n\n".join(path.read_text(encoding="utf-8").strip("\n") for path in paths)


def _tops(package: Distribution) -> tuple[str, ...]:
    """Return patterns of the files of a package below `site`, without those of programs."""
    tops = set()
    for file in package.files or ():
        if ".." not in file.parts:
            tops.add(f"site/{file.parts[0]}/*" if len(file.parts) > 1 else f"site/{file.parts[0]}")
    if plain_name(package.name) == "uv":
        tops.add("bin/uv")
    return tuple(sorted(tops))


def _holders(text: str) -> list[str]:
    """Return the lines of a text that say who has the copyright."""
    lines = (" ".join(line.split()) for line in HOLDER.findall(text))
    return list(dict.fromkeys(SIGN.sub("", line) for line in lines))[:MAX_HOLDERS]


def _folded(lines: Iterable[str], indent: int = 0) -> str:
    """Return lines as a field of Debian's control files has them: blank ones are a dot."""
    folded = [f" {line.rstrip()}" if line.strip() else " ." for line in map(_plain, lines)]
    return "\n".join(folded) if indent else "\n".join(folded).lstrip()


def _plain(line: str) -> str:
    return "".join(sign for sign in line.expandtabs() if sign.isprintable())


def _short(licence: str) -> str:
    """Return a licence's name as such a file writes it."""
    words = licence.replace(",", " and").split()
    if {"AND", "OR", "WITH"}.isdisjoint(words) and "and" not in words:
        return "-".join(words)
    return " ".join(word.lower() if word in ("AND", "OR", "WITH") else word for word in words)
