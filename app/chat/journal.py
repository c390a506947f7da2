"""The journal of a chat: what has changed since its file was written, one line for each change.

While an answer grows or a draft is typed, a line is added here, so that the whole chat need not be
written again each time. A line is a checksum and a JSON object. The first one tells from which
content of the file the changes start, so that a journal is never applied to another; and who writes
it. Reading ends at the first line that is not whole: a crash may come in the middle of one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.chat.branches.tree import MessageTree
from app.chat.conversation import Conversation, in_a_row
from app.chat.message import Message
from engine import atomic_write, process_mark

SUFFIX: Final = ".journal"

TEXTS: Final = ("title", "system_prompt", "draft")
"""Attributes of a chat that are texts and may change."""

WRONG: Final = (KeyError, TypeError, AttributeError, OverflowError, IndexError)
"""Errors that say of a line, besides a ValueError, that it holds no change."""

Change = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal was started with.

    Attributes:
        base: hash of the file that the changes start from.
        owner: mark of the process that writes it.
    """

    base: str
    owner: str


def start_journal(path: Path, base: str, change: Change) -> None:
    """Make a journal with its first change.

    Args:
        base: hash of the chat's file, from which the change starts.

    Raises:
        OSError: the disk is full or the folder cannot be written; there is no journal.
    """
    with atomic_write(path) as file:
        file.write(_line({"base": base, "owner": process_mark()}) + _line(change))


def add_change(path: Path, change: Change) -> None:
    """Add a change to a journal.

    Raises:
        OSError: the disk is full or the file cannot be written; it may end in half a line, after
            which no other may follow.
    """
    with path.open("ab") as file:
        file.write(_line(change))
        file.flush()
        os.fsync(file.fileno())


def read_journal(data: bytes) -> tuple[Journal | None, Iterator[Change]]:
    """Return what a journal was started with, None if that is damaged, and its whole changes."""
    lines = _whole_lines(data)
    try:
        first = next(lines)
        return Journal(str(first["base"]), str(first["owner"])), lines
    except (StopIteration, KeyError):
        return None, iter(())


def change_between(old: Conversation, new: Conversation) -> dict[str, Any]:
    """Return what makes the chat `old` be `new`, for `changed`.

    A text that has only grown is stored by its length before and what was added.
    """
    before, after = old.head(), new.head()
    head = {name: value for name, value in after.items() if before.get(name) != value}
    for name in TEXTS:
        if name in head:
            head[name] = _growth(before[name], after[name])
    lost = [name for name in before if name not in after]
    gone = [message.id for message in old.tree if message.id not in new.tree]
    messages = []
    for message in new.tree:
        known = old.tree.get(message.id)
        if known != message:
            added = _growth(known.content if known else "", message.content)
            messages.append(message.to_json() | {"content": added})
    change = {"head": head, "lost": lost, "gone": gone, "messages": messages}
    return change | {"chosen": new.tree.chosen}


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


def _growth(before: str, after: str) -> tuple[int, str]:
    """Return the number of characters that stay, all or none, and what follows them."""
    n_kept = len(before) if after.startswith(before) else 0
    return n_kept, after[n_kept:]


def _grown(before: str, growth: tuple[int, str]) -> str:
    n_kept, added = growth
    if not 0 <= n_kept <= len(before):
        raise ValueError("text is missing")
    return before[:n_kept] + added


def _line(value: Change) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return b"%08x %b\n" % (zlib.crc32(data), data)


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
