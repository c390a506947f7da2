"""Reads the arguments of tool calls, and makes truncated ones impossible to parse."""

from __future__ import annotations

import json

from app.server.web.responses import Document

CLOSINGS = {"{": "}", "[": "]"}


def read_arguments(text: str) -> Document | None:
    """Return the arguments of a call; None if the text is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def misfit(arguments: str) -> str:
    """Return text that makes truncated arguments invalid for lenient clients, too.

    LangChain closes open brackets of streamed arguments, and then runs the call with what has
    arrived: `delete_path("home/anna")` instead of a longer path. It gives up at a bracket that does
    not match.
    """
    opened: list[str] = []
    is_quoted = is_escaped = False
    for char in arguments:
        if is_quoted:
            is_quoted = char != '"' or is_escaped
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_quoted = True
        elif char in CLOSINGS:
            opened.append(char)
        elif char in CLOSINGS.values() and opened:
            opened.pop()
    quote = ("\\" if is_escaped else "") + '"' if is_quoted else ""
    return quote + ("]" if opened[-1:] == ["{"] else "}")
