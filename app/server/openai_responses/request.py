"""Items and tools of the Responses protocol as the engine takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from app.server.openai.conversation import (
    CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    ROLES,
    ContentPart,
    Effort,
    StreamOptions,
    content_text,
    described_tool,
    shown_content,
)
from app.server.refusal import bad_value
from app.server.request_fields import body_field
from engine import ChatMessage, JsonObject, Tool, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class InputItem:
    """An item of the conversation: a message, a thought, a call of a tool, or its result."""

    type: str = body_field("Kind of the item.", "message")
    role: Literal["", "system", "developer", "user", "assistant"] = body_field("Who speaks.", "")
    content: str | tuple[ContentPart, ...] | None = body_field("A text, or its parts.", None)
    call_id: str = body_field("Name of the call.", "")
    name: str = body_field("Name of the tool that was called.", "")
    arguments: str = body_field("Text of a JSON object.", "")
    input: str = body_field("What a custom tool was called with.", "")
    output: str | tuple[ContentPart, ...] | None = body_field("Result of the call.", None)
    summary: tuple[ContentPart, ...] = body_field("The thought in short.", ())
    encrypted_content: str | None = body_field("Without effect.", None)
    id: str | None = body_field("Without effect.", None)
    status: str | None = body_field("Without effect.", None)
    phase: str | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """A tool that the model may call."""

    type: str = body_field(
        '"function" or "custom"; tools of other kinds are not offered to the model.'
    )
    name: str = body_field("Name of the tool.", "")
    description: str = body_field("What it does, for the model.", "")
    parameters: JsonObject | None = body_field("JSON schema of its arguments.", None)
    strict: bool | None = body_field("Without effect: a schema always holds.", None)
    format: JsonObject | None = body_field(
        "Form of a custom tool's input, told to the model.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPick:
    """The choice of one tool, which the model must call."""

    type: str = body_field('"function" or "custom".')
    name: str = body_field("Name of the tool.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = body_field("Any text, or JSON.")
    name: str = body_field("Without effect.", "")
    description: str = body_field("Without effect.", "")
    schema: JsonObject | None = body_field("The schema; none is any object.", None)
    strict: bool | None = body_field("Without effect: a schema always holds.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the text of an answer."""

    format: TextFormat | None = body_field("The form of the answer.", None)
    verbosity: str | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningWish:
    """The wish for how much the model thinks."""

    effort: Effort | None = body_field("How much the model thinks, if it can.", None)
    summary: str | None = body_field("Without effect: thoughts come as they are.", None)
    generate_summary: str | None = body_field("Without effect.", None)
    context: str | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request for a response."""

    model: str = body_field("Name of the model; any that is loaded if it is empty.", "")
    input: str | tuple[InputItem, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    instructions: str = body_field("What the model is told before.", "")
    max_output_tokens: int | None = body_field(
        "Most tokens of the answer, thoughts included.", None, least=1, most=2**31 - 1
    )
    temperature: float | None = body_field("Higher is more varied.", None, least=0, most=5)
    top_p: float | None = body_field("Share of the likeliest tokens.", None, least=0, most=1)
    stream: bool = body_field("Send the answer as it is written.", default=False)
    stream_options: StreamOptions | None = body_field("Without effect.", None)
    tools: tuple[ResponseTool, ...] = body_field("What the model may call.", (), most=MAX_TOOLS)
    tool_choice: str | ToolPick | None = body_field(
        '"none", "auto", "required", or a tool that must be called.', None
    )
    parallel_tool_calls: bool = body_field("Whether several calls may come.", default=False)
    text: TextConfig | None = body_field("What the text is like.", None)
    reasoning: ReasoningWish | None = body_field("How much the model thinks.", None)
    previous_response_id: str | None = body_field("Refused: nothing is kept.", None)
    conversation: str | JsonObject | None = body_field("Refused: nothing is kept.", None)
    prompt: JsonObject | None = body_field("Refused: there are no stored prompts.", None)
    background: bool | None = body_field("Refused if true.", None)
    store: bool | None = body_field("Without effect: nothing is stored.", None)
    metadata: JsonObject | None = body_field("Given back as it is.", None)
    include: tuple[str, ...] = body_field("Without effect.", ())
    truncation: str = body_field("Without effect.", "")
    top_logprobs: int | None = body_field("Without effect.", None)
    max_tool_calls: int | None = body_field("Without effect.", None)
    user: str = body_field("Without effect.", "")
    service_tier: str = body_field("Without effect.", "")
    safety_identifier: str = body_field("Without effect.", "")
    prompt_cache_key: str = body_field("Without effect: prompts are always cached.", "")
    prompt_cache_retention: str = body_field("Without effect.", "")
    client_metadata: JsonObject | None = body_field("Without effect.", None)


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
    """Return which tools the model may or must call, as `AnswerRequest.tool_choice` has it.

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
