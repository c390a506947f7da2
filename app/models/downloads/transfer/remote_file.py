"""A file on a server, and the place on this disk that it may have.

Names come from the network, so each is checked before it becomes part of a path.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from app.core.paths import is_device_name
from app.core.translation import tr
from engine import EngineError, one_line

MOST_NAME = 200
"""Most bytes of a name; file systems allow 255, and the downloader appends to it."""

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"/\\|?*\u200e\u200f\u202a-\u202e\u2066-\u2069]')
"""Characters that a path gives a meaning, that Windows refuses, or that make a name look other."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its server describes it.

    Attributes:
        url: address without secrets.
        name: path in the repository, with "/" between folders; never used as a path here.
        n_bytes: size.
        sha256: hash of its bytes in hexadecimal; "" where the server gives none.
        repo: repository, as "owner/name", or the host of a plain link.
        commit: state of the repository; "" where there is none.
    """

    url: str
    name: str
    n_bytes: int
    sha256: str = ""
    repo: str = ""
    commit: str = ""

    def is_same(self, other: RemoteFile) -> bool:
        """Return whether both have the same bytes, as far as servers tell."""
        if self.sha256 and other.sha256:
            return (self.sha256, self.n_bytes) == (other.sha256, other.n_bytes)
        mine, others = (
            (file.repo, file.commit, file.name, file.n_bytes, file.sha256) for file in (self, other)
        )
        return mine == others


def safe_name(name: str) -> str:
    """Return a name from the network if it can only be the name of one file or folder.

    Raises:
        EngineError: it could be something else, here or on another system.
    """
    name = unicodedata.normalize("NFC", name)
    is_bad = (
        not name.strip(". ")
        or name != name.strip()
        or name.endswith(".")
        or name.startswith(".")
        or FORBIDDEN.search(name) is not None
        or is_device_name(name)
        or len(name.encode(errors="replace")) > MOST_NAME
    )
    if is_bad or not _is_text(name):
        raise EngineError(
            tr("The name “{name}” cannot be used for a file.").format(name=one_line(name, 80)),
            tr("Nothing was downloaded. Tell whoever published the model."),
        )
    return name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def destination(folder: Path, publisher: str, model: str, name: str) -> Path:
    """Return the path of a file as "publisher/model/file.gguf" in a folder of models.

    Raises:
        EngineError: a name could lead elsewhere, or the file is no model.
    """
    if not name.lower().endswith(".gguf"):
        raise EngineError(
            tr("“{name}” is not a .gguf file.").format(name=one_line(name, 80)),
            tr("Pick a file that ends in .gguf."),
        )
    return folder / safe_name(publisher) / safe_name(model) / safe_name(name)


def file_names(paths: list[str]) -> dict[str, str]:
    """Return a file name for each path of a repository: its last part, if no other has the same.

    A model and its helpers lie in one folder here, whatever folders they had there. Names that
    differ by case alone are one file on Windows and macOS, so the later ones get a number.
    """
    last = [path.rpartition("/")[2] for path in paths]
    keys = [_key(name) for name in last]
    names, taken = dict[str, str](), set[str]()
    for path, name in zip(paths, last, strict=True):
        given = made = name if keys.count(_key(name)) == 1 else path.replace("/", "-")
        number = 1
        while _key(given) in taken:
            number += 1
            stem, dot, suffix = made.rpartition(".")
            given = f"{stem}-{number}{dot}{suffix}"
        taken.add(_key(given))
        names[path] = given
    return names


def _key(name: str) -> str:
    """Return what two names share that are one file on some system."""
    return unicodedata.normalize("NFC", name).casefold()
