"""A file on a server, and the place on this disk that it may have.

Names come from the network, so each is checked before it becomes part of a path.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from app.translation import tr
from engine import EngineError, one_line

MOST_NAME = 200
"""Most bytes of a name; file systems allow 255, and the downloader appends to it."""

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"/\\|?*\u200e\u200f\u202a-\u202e\u2066-\u2069]')
"""Characters that a path gives a meaning, that Windows refuses, or that make a name look other."""

DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)),
}
"""Names that are no files on Windows, whatever their suffix."""


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
    stem = name.partition(".")[0].strip().casefold()
    is_bad = (
        not name.strip(". ")
        or name != name.strip()
        or name.endswith(".")
        or name.startswith(".")
        or FORBIDDEN.search(name) is not None
        or stem in DEVICES
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

    A model and its helpers lie in one folder here, whatever folders they had there.
    """
    last = [path.rpartition("/")[2] for path in paths]
    return {
        path: name if last.count(name) == 1 else path.replace("/", "-")
        for path, name in zip(paths, last, strict=True)
    }
