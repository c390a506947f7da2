"""What a server answers, as text for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from app.tools.server_store import ToolResult
from engine import one_line, printable

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock

NOTHING: Final = "[The tool has returned nothing.]"


def tool_result(result: CallToolResult, most: int) -> ToolResult:
    """Return the result of a call.

    Args:
        most: size limit of its text, in characters.
    """
    texts = [text for block in result.content if (text := _block_text(block, most))]
    structured = result.structured_content
    has_text = any(block.type == "text" and block.text for block in result.content)
    if structured is not None and not has_text:
        texts.append(json.dumps(structured, ensure_ascii=False, default=str))
    return ToolResult(limited("\n".join(texts) or NOTHING, most), bool(result.is_error))


def limited(text: str, most: int) -> str:
    """Return a printable text of at most `most` characters, and how much was cut off."""
    text = printable(text)
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[Cut: the first {most} of {len(text)} characters.]"


def _block_text(block: ContentBlock, most: int) -> str:
    """Return what a block says, or its name in brackets where that is no text."""
    match block.type:
        case "text":
            return block.text
        case "image":
            return f"[Picture: {_kind(block.mime_type)}, {_size(block.data)}]"
        case "audio":
            return f"[Audio: {_kind(block.mime_type)}, {_size(block.data)}]"
        case "resource_link":
            title = one_line(block.title or block.name, 200)
            return f"[Link: {title}, {one_line(str(block.uri), 1000)}]"
        case "resource":
            return _resource_text(block.resource, most)


def _resource_text(resource: Any, most: int) -> str:
    head = f"Resource: {one_line(str(resource.uri), 1000)}"
    text = getattr(resource, "text", None)
    if text is None:
        return f"[{head}, {_kind(resource.mime_type)}, {_size(resource.blob)}]"
    return f"[{head}]\n{text[: most + 1]}"


def _kind(mime_type: str | None) -> str:
    return one_line(mime_type or "application/octet-stream", 100)


def _size(base64: str) -> str:
    return f"{(len(base64) - base64[-2:].count('=')) * 3 // 4} bytes"


MAX_NAME: Final = 64
MAX_PREFIX: Final = 24

BETWEEN: Final = "__"
"""What stands between a server's part of a name and the tool's; no server's part has it."""


def server_prefixes(servers: Sequence[str]) -> dict[str, str]:
    """Return the part of tools' names that stands for each server, by the servers' names."""
    single = (re.sub("_{2,}", "_", _plain(name))[:MAX_PREFIX] for name in servers)
    plain = [name.strip("_-") or "server" for name in single]
    return dict(zip(servers, _unique(plain, MAX_PREFIX), strict=True))


def tool_names(prefix: str, tools: Sequence[str]) -> list[str]:
    """Return the name of each tool of a server for models, in their order."""
    start = prefix + BETWEEN
    return [start + name for name in _unique(map(_plain, tools), MAX_NAME - len(start))]


def _plain(name: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "_", name)


def _unique(names: Iterable[str], most: int) -> list[str]:
    """Cut names to `most` characters; those that are there already get a number."""
    found: list[str] = []
    known: set[str] = set()
    for name in names:
        given, n = name[:most], 1
        while given.lower() in known:
            n += 1
            given = f"{name[: most - len(str(n)) - 1].rstrip('_')}_{n}"
        known.add(given.lower())
        found.append(given)
    return found
