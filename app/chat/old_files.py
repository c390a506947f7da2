"""Chats of versions without a database: of each a JSON file, and a journal of later changes.

A line of a journal is a checksum and a JSON object. The first one names the content of the file
from which the changes start, so that a journal is never applied to another. Reading ends at the
first line that is not whole: a crash may come in the middle of one.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.chat.branches.tree import MessageTree
from app.chat.chat_file import parse_chat
from app.chat.conversation import SAFE_ID, Conversation, in_a_row
from app.chat.message import Message
from engine import read_file

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


def _changed_tree(tree: MessageTree[Message], change: Change) -> MessageTree[Message]:
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


def _changed_row(row: Sequence[Message], change: Change) -> MessageTree[Message]:
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
