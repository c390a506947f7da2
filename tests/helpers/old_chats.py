"""The files of chats as versions without a database have written them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from app.chat.chat_file import JOURNAL, TEXTS, encoded
from app.chat.conversation import Conversation
from engine import process_mark


def write_chat(path: Path, chat: Conversation) -> str:
    """Write the file of a chat; return the hash of its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(encoded(chat.to_json()))
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def journal_line(value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return b"%08x %b\n" % (zlib.crc32(data), data)


def write_with_journal(path: Path, states: list[Conversation]) -> Path:
    """Write the first state of a chat to its file, and the others to its journal; return that."""
    base = write_chat(path, states[0])
    lines = [journal_line({"base": base, "owner": process_mark()})]
    for old, new in pairwise(states):
        lines.append(journal_line(change_between(old, new)))
    journal = path.with_suffix(JOURNAL)
    journal.write_bytes(b"".join(lines))
    return journal


def change_between(old: Conversation, new: Conversation) -> dict[str, Any]:
    """Return what makes the chat `old` be `new`.

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


def _growth(before: str, after: str) -> tuple[int, str]:
    """Return the number of characters that stay, all or none, and what follows them."""
    n_kept = len(before) if after.startswith(before) else 0
    return n_kept, after[n_kept:]
