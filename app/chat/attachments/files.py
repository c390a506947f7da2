"""Files in drafts, read by a child process with time and memory limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QObject

import engine  # names used only in this module load on first access
from app.chat.message import Attachment
from app.core.background import KeptChild, KeyedJobs
from app.core.translation import tr
from engine import EngineError, one_line, program_command

log = logging.getLogger(__name__)

COMMAND: Final = program_command("app.chat.attachments.documents")
MAX_SHOWN_NAME: Final = 60

Marks = tuple[tuple[int, int], ...]
"""Pairs of a text offset and the number of tokens before it; the last pair is for the end."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file's text; `marks` says where it may be cut, and is empty if no model is loaded."""

    text: str
    n_bytes: int
    marks: Marks


class NoTextThere(EngineError):
    """A file has no usable text.

    Attributes:
        is_scanned: whether it is a PDF whose pages are images.
    """

    def __init__(self, answer: Mapping[str, object], name: str) -> None:
        super().__init__(problem_text(answer).format(name=name, why=answer.get("why", "")))
        self.is_picture = answer["problem"] == "picture"
        self.is_scanned = answer["problem"] == "scanned"


class AttachmentReader(QObject):
    """Reads files one at a time, on a thread."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._jobs = KeyedJobs("tandem-files", self)
        self._child = KeptChild(COMMAND)

    def read(
        self, key: str, path: Path, model: str, then: Callable[[ReadFile | EngineError], None]
    ) -> None:
        """Read a file, and call `then` with its text or an error.

        Args:
            model: path of the model that counts the tokens; "" if there is none.
        """
        self._run(key, path.name, {"path": str(path.absolute()), "model": model}, then)

    def count(self, key: str, file: ReadFile, model: str, then: Callable[[ReadFile], None]) -> None:
        """Count a file's tokens with another model; the result has no marks if that fails."""

        def with_text(counted: ReadFile | EngineError) -> None:
            marks = counted.marks if isinstance(counted, ReadFile) else ()
            then(ReadFile(file.text, file.n_bytes, marks))

        self._run(key, key, {"text": file.text, "model": model}, with_text)

    def close(self) -> None:
        """Stop the child and the thread."""
        self._child.kill()
        self._jobs.close()
        self._child.close()

    def _run(
        self,
        key: str,
        name: str,
        request: dict[str, str],
        then: Callable[[ReadFile | EngineError], None],
    ) -> None:
        found: list[ReadFile] = []

        def report(error: Exception | None) -> None:
            if found:
                then(found[0])
            elif isinstance(error, EngineError):
                then(error)

        self._jobs.run(key, lambda: found.append(self._ask(name, request)), report)

    def _ask(self, name: str, request: dict[str, str]) -> ReadFile:
        from app.chat.attachments.documents import (  # late: only for the child
            MAX_MEMORY,
            MAX_SECONDS,
        )

        shown = one_line(name, MAX_SHOWN_NAME)
        try:
            answer = self._child.ask(request, MAX_MEMORY, MAX_SECONDS)
        except (engine.ChildEnded, OSError) as error:
            log.info("%s cannot be read: %s", shown, error)
            raise EngineError(
                tr("{name} cannot be read: it takes too much time or memory.").format(name=shown),
                tr("Attach a smaller file, or paste the relevant part."),
            ) from None
        if "problem" in answer:
            raise NoTextThere(answer, shown)
        return _read_file(answer)


def problem_text(answer: Mapping[str, object]) -> str:
    """Return a sentence for a problem that the child reported, with `{name}` and `{why}`."""
    from app.chat.attachments.documents import Problem  # late, as above

    texts = {
        Problem.FOLDER: tr("{name} is a folder. Attach the files in it."),
        Problem.NO_FILE: tr("{name} is not a readable file."),
        Problem.TOO_LARGE: tr("{name} is larger than 64 MB, the limit for attachments."),
        Problem.TOO_LONG: tr(
            "{name} is longer than 8 million characters, the limit for attachments."
        ),
        Problem.EMPTY: tr("{name} is empty."),
        Problem.PICTURE: tr("{name} is an image."),
        Problem.NO_TEXT: tr("{name} is not a text file. Text, code and PDF files can be attached."),
        Problem.LOCKED: tr("{name} is password-protected. Attach a copy without a password."),
        Problem.DAMAGED: tr("{name} is not a readable PDF."),
        Problem.SCANNED: tr("{name} contains images of pages but no text."),
        Problem.UNREADABLE: tr("{name} cannot be read: {why}."),
    }
    return texts[Problem(str(answer["problem"]))]


def _read_file(answer: dict[str, Any]) -> ReadFile:
    marks = tuple((int(place), int(n_tokens)) for place, n_tokens in answer["marks"])
    return ReadFile(str(answer.get("text", "")), int(answer.get("n_bytes", 0)), marks)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file's text."""

    start: int
    end: int
    n_tokens: int


@dataclass(slots=True, eq=False)
class DraftFile:
    """A file attached to the draft.

    Attributes:
        file: its text; None while it is being read.
        part: part to send; None for the whole file.
        number, n_parts: index of that part, starting at 1, and the number of parts.
    """

    key: str
    path: Path
    file: ReadFile | None = None
    part: FilePart | None = None
    number: int = 1
    n_parts: int = 1

    @property
    def is_pdf(self) -> bool:
        """Whether the file is a PDF, whose pages can be attached as images."""
        return self.path.suffix.lower() == ".pdf"

    @property
    def n_tokens(self) -> int | None:
        """Number of tokens to send; None if unknown."""
        if self.part is not None:
            return self.part.n_tokens
        return self.file.marks[-1][1] if self.file is not None and self.file.marks else None

    def choose(self, parts: tuple[FilePart, ...], number: int) -> None:
        """Select part `number` to send, counting from 1."""
        self.part, self.number, self.n_parts = parts[number - 1], number, len(parts)

    def attachment(self) -> Attachment:
        """Return the attachment for a message; the file must have been read."""
        assert self.file is not None
        text, part = self.file.text, self.part
        if part is not None:
            text = text[part.start : part.end]
        return Attachment(
            self.path.name, text, self.file.n_bytes, self.n_tokens or 0, self.number, self.n_parts
        )


def parts_of(marks: Marks, room: int) -> tuple[FilePart, ...]:
    """Split a text into parts of at most `room` tokens; none if the marks are too far apart."""
    parts: list[FilePart] = []
    start = before = 0  # offset and token count where the part starts
    last = (0, 0)
    for place, n_tokens in marks:
        if n_tokens - before > room:
            if last[0] <= start:
                return ()
            parts.append(FilePart(start, last[0], last[1] - before))
            start, before = last
            if n_tokens - before > room:
                return ()
        last = (place, n_tokens)
    if last[0] > start:
        parts.append(FilePart(start, last[0], last[1] - before))
    return tuple(parts)
