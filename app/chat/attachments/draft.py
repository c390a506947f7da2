"""The files of the message that is being written, and the parts of those that are too large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat.attachments.attachment import Attachment

if TYPE_CHECKING:
    from app.chat.attachments.reader import Marks, ReadFile


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file's text, between two places."""

    start: int
    end: int
    n_tokens: int


@dataclass(slots=True, eq=False)
class DraftFile:
    """A file that shall go with the next message.

    Attributes:
        file: its text; None while it is being read.
        part: part that is sent; None for the whole file.
        number, n_parts: number of that part, from 1, and of all parts.
    """

    key: str
    path: Path
    file: ReadFile | None = None
    part: FilePart | None = None
    number: int = 1
    n_parts: int = 1

    @property
    def is_pdf(self) -> bool:
        """Whether the file has pages that can be shown as pictures."""
        return self.path.suffix.lower() == ".pdf"

    @property
    def n_tokens(self) -> int | None:
        """Number of tokens that are sent; None where that is unknown."""
        if self.part is not None:
            return self.part.n_tokens
        return self.file.marks[-1][1] if self.file is not None and self.file.marks else None

    def choose(self, parts: tuple[FilePart, ...], number: int) -> None:
        """Send one of the parts, counted from 1."""
        self.part, self.number, self.n_parts = parts[number - 1], number, len(parts)

    def attachment(self) -> Attachment:
        """Return what the message keeps of the file, which has been read."""
        assert self.file is not None
        text, part = self.file.text, self.part
        if part is not None:
            text = text[part.start : part.end]
        return Attachment(
            self.path.name, text, self.file.n_bytes, self.n_tokens or 0, self.number, self.n_parts
        )


def parts_of(marks: Marks, room: int) -> tuple[FilePart, ...]:
    """Return a text in parts of at most `room` tokens; none if not even one piece has room."""
    parts: list[FilePart] = []
    start = before = 0  # place and tokens where the part begins
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
