"""The file of a chat: JSON, replaced as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from app.chat.conversation import Conversation
from engine import atomic_write

SUFFIX: Final = ".json"

SLICE: Final = 1 << 16
"""Number of characters encoded at once. While they are, the window's thread waits for Python's
lock: a text of 10 MB in one go would cost it 30 ms."""


def write_chat(path: Path, chat: Conversation) -> str:
    """Replace the file of a chat; return the hash of its content.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with atomic_write(path) as file:
        for piece in _pieces(chat.to_json()):
            data = piece.encode(errors="surrogatepass")
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def parse_chat(data: bytes) -> Conversation:
    """Return the chat of a file's content.

    Raises:
        ValueError, RecursionError: it is no chat.
    """
    values = json.loads(data.decode(errors="surrogatepass"))
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return Conversation.from_json(values)


def content_hash(data: bytes) -> str:
    """Return the hash of a file's content, as `write_chat` does."""
    return hashlib.sha256(data).hexdigest()


def _pieces(value: object) -> Iterator[str]:
    """Yield the JSON of a value piece by piece, with a line for each entry."""
    if isinstance(value, str):
        yield '"'
        for start in range(0, len(value), SLICE):
            yield json.dumps(value[start : start + SLICE], ensure_ascii=False)[1:-1]
        yield '"'
    elif isinstance(value, dict) and value:
        opening = "{\n"
        for name, entry in value.items():
            yield f"{opening}{json.dumps(name)}: "
            yield from _pieces(entry)
            opening = ",\n"
        yield "\n}"
    elif isinstance(value, list):
        opening = "["
        for entry in value:
            yield opening
            yield from _pieces(entry)
            opening = ",\n"
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)
