"""Calls and their results as a model reads them, in English."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.chat.tools.tool_use import CallState, ToolUse, read_arguments
from engine import ChatMessage, ToolCall

WITHOUT_RESULT: Final[dict[CallState, str]] = {
    "writing": "This call was cut off before it was whole, so it did not run.",
    "cut": "This call was cut off before it was whole, so it did not run.",
    "waiting": "The user has not let this call run.",
    "running": "This call has no result yet.",
    "done": "This call has succeeded without any output.",
    "failed": "This call has failed.",
    "refused": "The user has refused this call.",
    "stopped": "The user has stopped this call before it had a result.",
}
"""What a model is told of a call in a state that has no result of its own."""


def call_turns(text: str, thought: str, calls: Sequence[ToolUse]) -> list[ChatMessage]:
    """Return the turns of an answer with calls: the answer, and a result for each call.

    Args:
        text: what the answer says.
        thought: thought in front of it; "" to leave it out.
    """
    asked = tuple(ToolCall(call.name, _arguments(call), call.id) for call in calls)
    results = [
        ChatMessage("tool", _told(call), tool_call_id=call.id, name=call.name) for call in calls
    ]
    return [ChatMessage("assistant", text.strip(), thought, asked), *results]


def _arguments(call: ToolUse) -> str:
    """Return arguments that a template can read; those that cannot be are left out."""
    is_object = bool(call.arguments) and read_arguments(call.arguments) is not None
    return call.arguments if is_object else "{}"


def _told(call: ToolUse) -> str:
    has_own = call.state in ("done", "failed") and call.result.strip()
    return call.result if has_own else WITHOUT_RESULT[call.state]
