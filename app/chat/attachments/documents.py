"""Text from attached files: encodings, PDFs, refused formats; runs in a child process."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import engine
from engine import answer_lines, ending_after, read_file

MAX_BYTES: Final = 64 << 20
MAX_CHARACTERS: Final = 8_000_000
MAX_PAGES: Final = 5000

CHUNK: Final = 2000
"""Approximate number of characters between places where a text may be cut."""

PICTURES: Final = (
    b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*", b"\x00\x00\x01\x00",
)  # fmt: skip
"""Magic numbers of image formats: PNG, JPEG, GIF, BMP, TIFF and icons."""

CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Control characters not found in text files, unlike tabs, line and page breaks, and escapes."""


class NoText(Exception):
    """A file has no usable text; the argument is a `Problem`."""


class Problem(StrEnum):
    """Reasons why a file cannot be attached."""

    FOLDER = "folder"
    NO_FILE = "no file"
    TOO_LARGE = "too large"
    TOO_LONG = "too long"
    EMPTY = "empty"
    PICTURE = "picture"
    NO_TEXT = "no text"
    LOCKED = "locked"
    DAMAGED = "damaged"
    SCANNED = "scanned"
    UNREADABLE = "unreadable"


def read_text(path: Path) -> str:
    """Return a file's text, with line breaks as "\\n".

    Raises:
        NoText: it has no text, or is too large.
        OSError: it cannot be read.
    """
    if path.is_dir():
        raise NoText(Problem.FOLDER)
    if not path.is_file():
        raise NoText(Problem.NO_FILE)
    if path.stat().st_size > MAX_BYTES:
        raise NoText(Problem.TOO_LARGE)
    try:
        data = read_file(path, MAX_BYTES)
    except ValueError:  # it has been replaced or has grown
        raise NoText(Problem.TOO_LARGE) from None
    text = _pdf_text(data) if data.lstrip()[:5] == b"%PDF-" else _decoded(data)
    if not text.strip():
        raise NoText(Problem.EMPTY)
    if len(text) > MAX_CHARACTERS:
        raise NoText(Problem.TOO_LONG)
    return text


def cuts(text: str) -> list[int]:
    """Return offsets where a text may be cut, preferably at line ends, and at the end."""
    found, start = list[int](), 0
    while start + CHUNK < len(text):
        end = text.rfind("\n", start + CHUNK // 2, start + CHUNK) + 1
        if not end:
            end = text.rfind(" ", start + CHUNK // 2, start + CHUNK) + 1
        start = end or start + CHUNK
        found.append(start)
    return [*found, len(text)]


def _decoded(data: bytes) -> str:
    if data.startswith(PICTURES) or data[8:12] == b"WEBP" or data[4:12] == b"ftypheic":
        raise NoText(Problem.PICTURE)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", errors="replace")
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", errors="replace")
            if re.search(rb"[\x00-\x08\x0e-\x1f]", data):
                raise NoText(Problem.NO_TEXT) from None
    if CONTROL.search(text):
        raise NoText(Problem.NO_TEXT)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _pdf_text(data: bytes) -> str:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        is_locked = "password" in str(error).lower()
        raise NoText(Problem.LOCKED if is_locked else Problem.DAMAGED) from None
    pages, n_characters = list[str](), 0
    for number in range(min(len(document), MAX_PAGES)):
        try:
            page = document[number]
            text = page.get_textpage().get_text_bounded()
        except pypdfium2.PdfiumError:
            continue  # the page is damaged
        pages.append(text.replace("\r\n", "\n").replace("\x02", "").replace("\ufffe", ""))
        n_characters += len(text)
        page.close()
        if n_characters > MAX_CHARACTERS:
            break
    if not "".join(pages).strip():
        raise NoText(Problem.SCANNED)
    return CONTROL.sub(" ", "\n\n".join(pages))


MAX_MEMORY = 2 << 30
"""Memory limit for the child in bytes; a vocabulary takes up to about 500 MB."""

MAX_SECONDS = 60.0
"""Time limit per file."""


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Return a file's text with token counts, or the token counts for a text.

    Args:
        request: "path" of a file, or "text"; also "model", the path of a model or "".

    Returns:
        "text" and "n_bytes" for a file; "marks", pairs of an offset in the text and the number of
        tokens before it, empty if there is no model; or "problem", with "why" for an OSError.
    """
    made: dict[str, object] = {}
    text = request.get("text")
    if text is None:
        path = Path(request["path"])
        try:
            text = read_text(path)
            made = {"text": text, "n_bytes": path.stat().st_size}
        except NoText as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": Problem.UNREADABLE, "why": error.strerror or str(error)}
    made["marks"] = _marks(text, request["model"]) if request["model"] else []
    return made


def _marks(text: str, model: str) -> list[tuple[int, int]]:
    """Return the offsets where a text may be cut, each with the number of tokens before it."""
    try:
        tokenizer = _tokenizer(model)
    except engine.EngineError:  # the model has no vocabulary
        return []
    marks, start, n_tokens = list[tuple[int, int]](), 0, 0
    for end in cuts(text):
        n_tokens += len(tokenizer.encode(text[start:end], add_special=False))
        marks.append((end, n_tokens))
        start = end
    return marks


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    return engine.load_tokenizer(model)


def _answer(line: bytes) -> dict[str, object]:
    with ending_after(2 * MAX_SECONDS):
        return answer(json.loads(line))


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
