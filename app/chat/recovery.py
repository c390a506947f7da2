"""Recovery of chats from a damaged database, page by page, without SQLite.

Each leaf page is parsed separately, so a damaged leaf page loses only its own rows, and a damaged
header or interior page loses none. See https://www.sqlite.org/fileformat.html.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from app.chat.chat_file import decoded
from app.chat.conversation import Conversation, in_a_row, title_from
from app.chat.message import Message
from app.chat.tree import MessageTree

PAGE: Final = 4096
"""SQLite's default page size, in bytes."""

LEAF: Final = 0x0D
"""First byte of a table's leaf page."""

MAX_ROW: Final = 256 << 20

WRONG: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors raised for a damaged row."""

Row = tuple[Any, ...]


def readable_chats(path: Path) -> Iterator[Conversation]:
    """Yield the readable chats from a damaged database and its write-ahead log (raises OSError)."""
    heads: dict[str, dict[str, Any]] = {}
    messages: dict[str, dict[int, Message]] = {}
    for row in _rows(_pages(path)):
        with suppress(*WRONG):
            match row:
                case (None, str(chat_id), int(), str(), int() | float(), bytes(head)):
                    heads[chat_id] = dict(decoded(head))
                case (None, str(chat_id), int(number), bytes(data)):
                    message = Message.from_json(decoded(data))
                    messages.setdefault(chat_id, {})[number] = message
    for chat_id in messages.keys() | heads.keys():
        found = [message for _, message in sorted(messages.get(chat_id, {}).items())]
        yield _chat_of(chat_id, heads.get(chat_id, {}), found)


def _chat_of(chat_id: str, head: dict[str, Any], messages: list[Message]) -> Conversation:
    try:
        tree = MessageTree(messages, head.get("chosen", ()))
    except WRONG:  # a message's parent is lost
        tree = MessageTree(in_a_row(messages))
    with suppress(*WRONG):
        return Conversation.of_parts(head, tree)
    now, title = time.time(), title_from(messages[0].content) if messages else ""
    return Conversation.of_parts(
        {"id": chat_id, "title": title, "created": now, "updated": now}, tree
    )


def _pages(path: Path) -> dict[int, bytes]:
    data = path.read_bytes()
    pages = {n // PAGE + 1: data[n : n + PAGE] for n in range(0, len(data), PAGE)}
    try:
        log = Path(f"{path}-wal").read_bytes()
    except FileNotFoundError:
        return pages
    salts, waiting = log[16:24], dict[int, bytes]()
    for start in range(32, len(log) - PAGE - 23, PAGE + 24):
        number, n_pages = struct.unpack_from(">II", log, start)
        if log[start + 8 : start + 16] != salts:
            break
        waiting[number] = log[start + 24 : start + 24 + PAGE]
        if n_pages:  # the last page of a transaction
            pages |= waiting
            waiting = {}
    return pages


def _rows(pages: dict[int, bytes]) -> Iterator[Row]:
    for number, page in sorted(pages.items()):
        start = 100 if number == 1 else 0
        if len(page) < PAGE or page[start] != LEAF:
            continue
        (n_rows,) = struct.unpack_from(">H", page, start + 3)
        for place in range(start + 8, min(start + 8 + 2 * n_rows, PAGE - 1), 2):
            (at,) = struct.unpack_from(">H", page, place)
            with suppress(ValueError, IndexError, KeyError, struct.error):
                yield _values(_payload(pages, page, at))


def _payload(pages: dict[int, bytes], page: bytes, at: int) -> bytes:
    size, at = _varint(page, at)
    _, at = _varint(page, at)
    if size > MAX_ROW:
        raise ValueError("too large")
    if size <= PAGE - 35:
        return page[at : at + size]
    least = (PAGE - 12) * 32 // 255 - 23
    n_here = least + (size - least) % (PAGE - 4)
    n_here = n_here if n_here <= PAGE - 35 else least
    parts, n_left = [page[at : at + n_here]], size - n_here
    (following,) = struct.unpack_from(">I", page, at + n_here)
    while n_left > 0:
        part = pages[following][4 : 4 + n_left]
        (following,) = struct.unpack_from(">I", pages[following])
        parts.append(part)
        n_left -= PAGE - 4
    return b"".join(parts)


def _values(payload: bytes) -> Row:
    end, place = _varint(payload, 0)
    kinds = []
    while place < end:
        kind, place = _varint(payload, place)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        size = (kind - 12) // 2 if kind >= 12 else (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[kind]
        data = payload[place : place + size]
        if len(data) < size:
            raise ValueError("cut")
        place += size
        if kind >= 12:
            values.append(data.decode() if kind % 2 else data)
        elif kind == 7:
            values.append(struct.unpack(">d", data)[0])
        elif kind in (8, 9):
            values.append(kind - 8)
        else:
            values.append(int.from_bytes(data, signed=True) if kind else None)
    return tuple(values)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for n in range(8):
        byte = data[place + n]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + n + 1
    return value << 8 | data[place + 8], place + 9
