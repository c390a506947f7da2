"""The JSON of chats, chat files from older versions, and recovery of damaged files."""

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
"""Patterns before the first message in a chat file (texts have no bare quotes), and the others."""

MAX_FAILED: Final = 100
"""Maximum number of failed attempts to decode a message in a damaged file."""

SLICE: Final = 1 << 16
"""Characters encoded at a time; encoding holds the GIL, so 10 MB in one go would block the window
for 30 ms."""


def parse_chat(data: bytes) -> Conversation:
    """Return the chat in a file's content.

    Raises:
        ValueError, RecursionError: it is not a chat.
    """
    values = decoded(data)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return Conversation.from_json(values)


def salvaged(text: str) -> Conversation:
    """Return a chat with the intact messages from a truncated or damaged chat file.

    If parents are missing, the messages become a single branch.

    Raises:
        ValueError, RecursionError: it is not a chat, or has no intact message.
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
        found = ENTRY.search(text, end)  # skips other objects, such as attachments
        place = -1 if found is None else found.end() - 1
    if not messages:
        raise ValueError("no complete message")
    try:
        chat = Conversation(tree=MessageTree(messages))
    except ValueError:
        chat = Conversation.of(messages)
    for name in ("title", "system_prompt"):
        if isinstance(head.get(name), str):
            setattr(chat, name, head[name])
    return chat


def _head(text: str) -> dict[str, Any]:
    if not re.match(r'\s*\{\s*"(schema|id)"', text):
        raise ValueError("not a chat")
    try:
        head: dict[str, Any] = json.loads(text.rstrip().rstrip(",") + "}")
    except ValueError:
        return {}
    return head


def encoded(value: object) -> Iterator[bytes]:
    """Yield a value's JSON piece by piece; texts may contain lone surrogates."""
    return (piece.encode(errors="surrogatepass") for piece in _pieces(value))


def decoded(data: bytes) -> Any:
    """Return the value of JSON written by `encoded`.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return json.loads(data.decode(errors="surrogatepass"))


def _pieces(value: object) -> Iterator[str]:
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
MAX_BYTES: Final = 256 << 20

MAX_TRIES: Final = 3
"""Maximum number of attempts to read a chat that an older version is writing."""

TEXTS: Final = ("title", "system_prompt", "draft")
"""Chat attributes that a journal stores as appended text."""

WRONG: Final = (KeyError, TypeError, AttributeError, OverflowError, IndexError)
"""Errors, besides ValueError, raised for a journal line that is not a change."""

Change = Mapping[str, Any]

Stamp = tuple[int, int, int]
"""A file's modification time, inode and size; if its content changes, so does one of them."""

Stamps = tuple[Stamp | None, Stamp | None]
"""Stamps of a chat file and its journal; None for a missing file."""


@dataclass(frozen=True, slots=True)
class OldChat:
    """A chat from an older version; its stamps were taken before it was read."""

    path: Path
    chat: Conversation
    stamps: Stamps


def old_files(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """Return the files with a suffix, sorted by name; none if the folder is unreadable."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except OSError:
        return []


def read_old(path: Path) -> OldChat:
    """Return the chat in a file, with the changes from its journal.

    Raises:
        OSError, ValueError, RecursionError: it is unreadable or damaged.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(FileNotFoundError):  # another window has just merged the journal
            found = _read_once(path)
            if stamps_of(path) == found.stamps:
                return found
    return _read_once(path)


def stamps_of(path: Path) -> Stamps:
    """Return the stamps of a chat file and its journal (raises OSError)."""
    return _stamp(path), _stamp(path.with_suffix(JOURNAL))


def read_journal(data: bytes) -> tuple[str, Iterator[Change]]:
    """Return the hash of a journal's base file ("" if damaged), and the intact changes."""
    lines = _whole_lines(data)
    try:
        return str(next(lines)["base"]), lines
    except (StopIteration, KeyError):
        return "", iter(())


def changed(chat: Conversation, change: Change) -> Conversation:
    """Return a copy of a chat with a change applied.

    Raises:
        ValueError: the change does not fit this chat.
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
        raise ValueError(f"not a change: {error!r}") from error


def _changed_tree(tree: MessageTree, change: Change) -> MessageTree:
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
    n_kept, added = change["n_kept"], [dict(item) for item in change["messages"]]
    if not 0 <= n_kept <= len(row):
        raise ValueError("messages are missing")
    if added:
        before = row[n_kept].content if n_kept < len(row) else ""
        added[0]["content"] = _grown(before, added[0]["content"])
    kept = [message.copy() for message in row[:n_kept]]
    return MessageTree(in_a_row([*kept, *map(Message.from_json, added)]))


def _grown(before: str, growth: tuple[int, str]) -> str:
    """Apply `growth` to a text: the number of characters to keep, and the text to append."""
    n_kept, added = growth
    if not 0 <= n_kept <= len(before):
        raise ValueError("text is missing")
    return before[:n_kept] + added


def _read_once(path: Path) -> OldChat:
    stamps = stamps_of(path)
    data = read_file(path, MAX_BYTES)
    chat = parse_chat(data)
    if chat.id != path.stem or not SAFE_ID.fullmatch(path.stem):
        raise ValueError("the id does not match the file's name")
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
