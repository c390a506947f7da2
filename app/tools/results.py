"""Tool results as text for the model, and tool names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from app.tools.server_store import ToolResult
from engine import one_line, printable

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock

NOTHING: Final = "[The tool returned nothing.]"


def tool_result(result: CallToolResult, most: int) -> ToolResult:
    """Return a call's result, with its text limited to `most` characters."""
    texts = [text for block in result.content if (text := _block_text(block, most))]
    structured = result.structured_content
    has_text = any(block.type == "text" and block.text for block in result.content)
    if structured is not None and not has_text:
        texts.append(json.dumps(structured, ensure_ascii=False, default=str))
    return ToolResult(limited("\n".join(texts) or NOTHING, most), bool(result.is_error))


def limited(text: str, most: int) -> str:
    """Return printable text cut to `most` characters, with a note if anything was cut off."""
    text = printable(text)
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[Truncated: the first {most} of {len(text)} characters.]"


def _block_text(block: ContentBlock, most: int) -> str:
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
"""Separates the server's prefix from the tool's own name; no prefix contains it."""


def server_prefixes(servers: Sequence[str]) -> dict[str, str]:
    """Return each server's unique prefix for tool names, by server name."""
    single = (re.sub("_{2,}", "_", _plain(name))[:MAX_PREFIX] for name in servers)
    plain = [name.strip("_-") or "server" for name in single]
    return dict(zip(servers, _unique(plain, MAX_PREFIX), strict=True))


def tool_names(prefix: str, tools: Sequence[str]) -> list[str]:
    """Return unique names for a server's tools, as models see them, in order."""
    start = prefix + BETWEEN
    return [start + name for name in _unique(map(_plain, tools), MAX_NAME - len(start))]


def _plain(name: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "_", name)


def _unique(names: Iterable[str], most: int) -> list[str]:
    unique: list[str] = []
    known: set[str] = set()
    for name in names:
        one, n = name[:most], 1
        while one.lower() in known:
            n += 1
            one = f"{name[: most - len(str(n)) - 1].rstrip('_')}_{n}"
        known.add(one.lower())
        unique.append(one)
    return unique
