"""What a server answers, as text for the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from app.tools.states import ToolResult
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
