"""The JSON of a chat, and what can be read of a damaged file."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.chat.conversation import SAFE_ID, Conversation, in_a_row
from app.chat.message import Message
from app.chat.tree import MessageTree
from engine import read_file

MESSAGES: Final = re.compile(r'"messages":\s*\[\s*')
ENTRY: Final = re.compile(r",\s*\{")
"""Where messages begin in the file of a chat, and a further one; no text in it has bare quotes."""

MAX_FAILED: Final = 100
"""Failed attempts to decode a message of a damaged file before the rest is given up."""

SLICE: Final = 1 << 16
"""Number of characters encoded at once. While they are, the window's thread waits for Python's
lock: a text of 10 MB in one go would cost it 30 ms."""


def parse_chat(data: bytes) -> Conversation:
    """Return the chat of a file's content.

    Raises:
        ValueError, RecursionError: it is no chat.
    """
    values = decoded(data)
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return Conversation.from_json(values)


def salvaged(text: str) -> Conversation:
    """Return the whole messages of a chat whose file is cut or damaged.

    They are in a row unless all that they follow are there.

    Raises:
        ValueError, RecursionError: it was no chat, or has no whole message.
    """
    start = MESSAGES.search(text)
    head = {} if start is None else _head(text[: start.start()])
    messages, decoder, n_failed = list[Message](), json.JSONDecoder(), 0
    place = -1 if start is None else start.end()
    while place >= 0 and n_failed < MAX_FAILED:
        try:
            value, end = decoder.raw_decode(text, place)
            messages.append(Message.from_json(value))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            end, n_failed = place + 1, n_failed + 1
        found = ENTRY.search(text, end)  # what is no message, such as an attached file, is skipped
        place = -1 if found is None else found.end() - 1
    if not messages:
        raise ValueError("no whole message")
    try:
        chat = Conversation(tree=MessageTree(messages))
    except ValueError:
        chat = Conversation.of(messages)
    for name in ("title", "system_prompt"):
        if isinstance(head.get(name), str):
            setattr(chat, name, head[name])
    return chat


def _head(text: str) -> dict[str, Any]:
    """Return what stands before the messages.

    Raises:
        ValueError: it does not begin as a chat does.
    """
    if not re.match(r'\s*\{\s*"(schema|id)"', text):
        raise ValueError("no chat")
    try:
        head: dict[str, Any] = json.loads(text.rstrip().rstrip(",") + "}")
    except ValueError:
        return {}
    return head


def encoded(value: object) -> Iterator[bytes]:
    """Yield the JSON of a value piece by piece; texts may have halves of characters."""
    return (piece.encode(errors="surrogatepass") for piece in _pieces(value))


def decoded(data: bytes) -> Any:
    """Return the value of JSON that `encoded` has made.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(data.decode(errors="surrogatepass"))


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


SUFFIX, JOURNAL = ".json", ".journal"
"""Suffixes of the file of a chat and of its journal."""

MAX_BYTES: Final = 256 << 20
"""Size in bytes of the largest file and the longest journal that are read."""

MAX_TRIES: Final = 3
"""Number of times that a chat is read while an older version writes it."""

TEXTS: Final = ("title", "system_prompt", "draft")
"""Attributes of a chat of which a journal has what was added."""

WRONG: Final = (KeyError, TypeError, AttributeError, OverflowError, IndexError)
"""Errors that say of a line, besides a ValueError, that it holds no change."""

Change = Mapping[str, Any]

Stamp = tuple[int, int, int]
"""Modification time, inode and size of a file: one of them changes with its content."""

Stamps = tuple[Stamp | None, Stamp | None]
"""Stamps of a chat's file and of its journal; None for one that there is not."""


@dataclass(frozen=True, slots=True)
class OldChat:
    """A chat as it was read; its stamps are from before that."""

    path: Path
    chat: Conversation
    stamps: Stamps


def old_files(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """Return the files with a suffix, by name; none if the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except OSError:
        return []


def read_old(path: Path) -> OldChat:
    """Return the chat of a file, with the changes of its journal.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or holds no whole chat.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(FileNotFoundError):  # a journal that another window has just merged
            found = _read_once(path)
            if stamps_of(path) == found.stamps:
                return found
    return _read_once(path)


def stamps_of(path: Path) -> Stamps:
    """Return the stamps of a chat's file and its journal.

    Raises:
        OSError: one of them cannot be looked at.
    """
    return _stamp(path), _stamp(path.with_suffix(JOURNAL))


def read_journal(data: bytes) -> tuple[str, Iterator[Change]]:
    """Return the hash of the file a journal starts from, "" if damaged, and its whole changes."""
    lines = _whole_lines(data)
    try:
        return str(next(lines)["base"]), lines
    except (StopIteration, KeyError):
        return "", iter(())


def changed(chat: Conversation, change: Change) -> Conversation:
    """Return a chat after a change; `chat` stays as it is.

    Raises:
        ValueError: it is no change of this chat.
    """
    try:
        if "n_kept" in change:
            values, lost, tree = dict(change), ["n_kept"], _changed_row(chat.messages, change)
        else:
            values, lost = dict(change["head"]), change["lost"]
            tree = _changed_tree(chat.tree, change)
        for name in TEXTS:
            if name in values:
                values[name] = _grown(getattr(chat, name), values[name])
        head = {name: value for name, value in (chat.head() | values).items() if name not in lost}
        return Conversation.of_parts(head, tree)
    except WRONG as error:
        raise ValueError(f"no change: {error!r}") from error


def _changed_tree(tree: MessageTree, change: Change) -> MessageTree:
    """Return the messages after a change."""
    messages = {message.id: message for message in tree}
    for number in change["gone"]:
        del messages[number]
    for item in change["messages"]:
        known = messages.get(item["id"])
        content = _grown(known.content if known else "", item["content"])
        message = Message.from_json(item | {"content": content})
        messages[message.id] = message
    return MessageTree(messages.values(), change["chosen"])


def _changed_row(row: Sequence[Message], change: Change) -> MessageTree:
    """Return the messages after a change of a chat whose messages are in a row, as in schema 1."""
    n_kept, added = change["n_kept"], [dict(item) for item in change["messages"]]
    if not 0 <= n_kept <= len(row):
        raise ValueError("messages are missing")
    if added:
        before = row[n_kept].content if n_kept < len(row) else ""
        added[0]["content"] = _grown(before, added[0]["content"])
    kept = [message.copy() for message in row[:n_kept]]
    return MessageTree(in_a_row([*kept, *map(Message.from_json, added)]))


def _grown(before: str, growth: tuple[int, str]) -> str:
    """Return a text after a change: how many characters stay, and what follows them."""
    n_kept, added = growth
    if not 0 <= n_kept <= len(before):
        raise ValueError("text is missing")
    return before[:n_kept] + added


def _read_once(path: Path) -> OldChat:
    stamps = stamps_of(path)
    data = read_file(path, MAX_BYTES)
    chat = parse_chat(data)
    if chat.id != path.stem or not SAFE_ID.fullmatch(path.stem):
        raise ValueError("the id is not the file's name")
    if stamps[1] is not None:
        base, changes = read_journal(read_file(path.with_suffix(JOURNAL), MAX_BYTES))
        if base == hashlib.sha256(data).hexdigest():
            with suppress(ValueError):
                for change in changes:
                    chat = changed(chat, change)
    return OldChat(path, chat, stamps)


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _whole_lines(data: bytes) -> Iterator[Change]:
    for line in data.split(b"\n")[:-1]:
        checksum, _, content = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(content):
            return
        try:
            value = json.loads(content.decode(errors="surrogatepass"))
        except (ValueError, RecursionError):
            return
        if not isinstance(value, dict):
            return
        yield value
