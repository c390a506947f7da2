"""The JSON of a chat, and what can be read of a damaged file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from app.chat.branches.tree import MessageTree
from app.chat.conversation import Conversation
from app.chat.message import Message

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
