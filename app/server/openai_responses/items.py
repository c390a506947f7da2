"""Items and tools of the Responses protocol as the engine takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from app.server.openai.messages import (
    CHOICES,
    ROLES,
    content_text,
    described_tool,
    shown_content,
)
from app.server.openai_responses.response_request import (
    InputItem,
    ResponseRequest,
    ResponseTool,
    ToolPick,
)
from app.server.refusal import bad_value
from engine import ChatMessage, Tool, ToolCall

log = logging.getLogger(__name__)

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of parts that are texts."""

_text = partial(content_text, types=TEXTS)

CUSTOM_INPUT = "input"
"""Name of the only argument with which a custom tool is called."""

CUSTOM_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
)


def chat_messages(request: ResponseRequest) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation.

    Raises:
        Refusal: one has something that is no text, or that only its maker knows.
    """
    found = [ChatMessage("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return (*found, ChatMessage("user", request.input))
    called: dict[str, str] = {}  # names of tools by the calls' names
    for at, item in enumerate(request.input):
        message = _message(item, f"input[{at}]", called)
        if found and message.role == found[-1].role == "assistant":
            message = _joined(found.pop(), message)
        found.append(message)
    return tuple(found)


def _message(item: InputItem, place: str, called: dict[str, str]) -> ChatMessage:
    """Return an item as a message; thoughts and calls are messages of the assistant."""
    if item.type == "message":
        role = ROLES.get(item.role, item.role) or "user"
        text, pictures = shown_content(item.content, f"{place}.content", TEXTS)
        return ChatMessage(role, text, pictures=pictures)
    if item.type == "reasoning":
        thought = _text(item.content, f"{place}.content") or _text(item.summary, f"{place}.summary")
        return ChatMessage("assistant", "", reasoning=thought)
    if item.type in ("function_call", "custom_tool_call"):
        called[item.call_id] = item.name
        custom = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
        arguments = item.arguments or "{}" if item.type == "function_call" else custom
        call = ToolCall(item.name, arguments, item.call_id)
        return ChatMessage("assistant", "", tool_calls=(call,))
    if item.type in ("function_call_output", "custom_tool_call_output"):
        text, name = _text(item.output, f"{place}.output"), called.get(item.call_id, "")
        return ChatMessage("tool", text, tool_call_id=item.call_id, name=name)
    raise bad_value(
        f"{place}.type", f"{place} has the type {item.type[:40]!r}, which this server cannot read."
    )


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Return two messages of the assistant as one."""
    return replace(
        first,
        content="\n".join(filter(None, (first.content, second.content))),
        reasoning="\n".join(filter(None, (first.reasoning, second.reasoning))),
        tool_calls=first.tool_calls + second.tool_calls,
    )


def parameter_places(tools: Sequence[ResponseTool]) -> dict[str, str]:
    """Return the places of the schemas of functions' arguments, by the function's name."""
    return {tool.name: f"tools[{at}].parameters" for at, tool in enumerate(tools)}


def offered_tools(tools: Sequence[ResponseTool]) -> tuple[Tool, ...]:
    """Return the functions that the model may call.

    Tools that only their maker can run, such as a search of the web, are not offered to it.
    """
    found = []
    for tool in tools:
        if tool.type == "function":
            found.append(described_tool(tool.name, tool.description, tool.parameters))
        elif tool.type == "custom":
            found.append(Tool(tool.name, _custom_description(tool), CUSTOM_SCHEMA))
        else:
            log.warning("a tool of the type %.40r is not offered to the model", tool.type)
    return tuple(found)


def _custom_description(tool: ResponseTool) -> str:
    """Return what a custom tool does, with the form of its input."""
    grammar = (tool.format or {}).get("definition")
    return f"{tool.description}\n\nIts input:\n{grammar}" if grammar else tool.description


def custom_names(tools: Sequence[ResponseTool]) -> frozenset[str]:
    """Return the names of the tools whose input is a text."""
    return frozenset(tool.name for tool in tools if tool.type == "custom")


def tool_choice(request: ResponseRequest) -> str:
    """Return which tools the model may or must call, as `Generate.tool_choice` has it.

    Raises:
        Refusal: it is something else, or a tool that is not offered.
    """
    choice = request.tool_choice
    names = [tool.name for tool in request.tools if tool.type in ("function", "custom")]
    if isinstance(choice, ToolPick):
        if choice.name not in names:
            raise bad_value("tool_choice", "tool_choice names no function among the tools.")
        return f"={choice.name}"
    if choice is not None and choice not in CHOICES:
        wanted = ", ".join(f'"{one}"' for one in CHOICES)
        raise bad_value("tool_choice", f"tool_choice must be {wanted} or a tool.")
    if choice == "required" and not names:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return choice or "auto"
