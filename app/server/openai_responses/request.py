"""Requests in OpenAI's Responses protocol, and their conversion for the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from app.server.openai.conversation import (
    CHOICES,
    IGNORED,
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
    """An item in the conversation: a message, reasoning, a tool call or its result."""

    type: str = body_field("Type of the item.", "message")
    role: Literal["", "system", "developer", "user", "assistant"] = body_field("Author.", "")
    content: str | tuple[ContentPart, ...] | None = body_field("Text or content parts.", None)
    call_id: str = body_field("Id of the call.", "")
    name: str = body_field("Name of the called tool.", "")
    arguments: str = body_field("Arguments: a JSON object, as text.", "")
    input: str = body_field("Input to a custom tool.", "")
    output: str | tuple[ContentPart, ...] | None = body_field("Result of the call.", None)
    summary: tuple[ContentPart, ...] = body_field("Summary of the reasoning.", ())
    encrypted_content: str | None = body_field(IGNORED, None)
    id: str | None = body_field(IGNORED, None)
    status: str | None = body_field(IGNORED, None)
    phase: str | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """A tool that the model may call."""

    type: str = body_field('"function" or "custom"; other tools are ignored.')
    name: str = body_field("Name of the tool.", "")
    description: str = body_field("Description for the model.", "")
    parameters: JsonObject | None = body_field("JSON schema for the arguments.", None)
    strict: bool | None = body_field("Ignored; schemas are always enforced.", None)
    format: JsonObject | None = body_field(
        "Format of a custom tool's input, which is passed on to the model.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPick:
    """The tool that the model must call."""

    type: str = body_field('"function" or "custom".')
    name: str = body_field("Name of the tool.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """Structured output."""

    type: Literal["text", "json_object", "json_schema"] = body_field("Any text, or JSON.")
    name: str = body_field(IGNORED, "")
    description: str = body_field(IGNORED, "")
    schema: JsonObject | None = body_field("The schema; any object if omitted.", None)
    strict: bool | None = body_field("Ignored; schemas are always enforced.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings for an answer's text."""

    format: TextFormat | None = body_field("Structured output.", None)
    verbosity: str | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningWish:
    """Reasoning effort."""

    effort: Effort | None = body_field("Reasoning effort, if the model supports it.", None)
    summary: str | None = body_field("Ignored; reasoning is not summarized.", None)
    generate_summary: str | None = body_field(IGNORED, None)
    context: str | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request for a response."""

    model: str = body_field("Name of the model; empty for the loaded one.", "")
    input: str | tuple[InputItem, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    instructions: str = body_field("System prompt.", "")
    max_output_tokens: int | None = body_field(
        "Maximum number of tokens in the answer, including reasoning.",
        None,
        least=1,
        most=2**31 - 1,
    )
    temperature: float | None = body_field("Sampling temperature.", None, least=0, most=5)
    top_p: float | None = body_field("Top-p (nucleus) sampling.", None, least=0, most=1)
    stream: bool = body_field("Stream the answer.", default=False)
    stream_options: StreamOptions | None = body_field(IGNORED, None)
    tools: tuple[ResponseTool, ...] = body_field("Tools for the model.", (), most=MAX_TOOLS)
    tool_choice: str | ToolPick | None = body_field(
        '"none", "auto", "required", or a tool that must be called.', None
    )
    parallel_tool_calls: bool = body_field("Allow several calls.", default=False)
    text: TextConfig | None = body_field("Structured output.", None)
    reasoning: ReasoningWish | None = body_field("Reasoning effort.", None)
    previous_response_id: str | None = body_field("Rejected; nothing is stored.", None)
    conversation: str | JsonObject | None = body_field("Rejected; nothing is stored.", None)
    prompt: JsonObject | None = body_field("Rejected; there are no stored prompts.", None)
    background: bool | None = body_field("Rejected if true.", None)
    store: bool | None = body_field("Ignored; nothing is stored.", None)
    metadata: JsonObject | None = body_field("Returned unchanged.", None)
    include: tuple[str, ...] = body_field(IGNORED, ())
    truncation: str = body_field(IGNORED, "")
    top_logprobs: int | None = body_field(IGNORED, None)
    max_tool_calls: int | None = body_field(IGNORED, None)
    user: str = body_field(IGNORED, "")
    service_tier: str = body_field(IGNORED, "")
    safety_identifier: str = body_field(IGNORED, "")
    prompt_cache_key: str = body_field("Ignored; prompts are always cached.", "")
    prompt_cache_retention: str = body_field(IGNORED, "")
    client_metadata: JsonObject | None = body_field(IGNORED, None)


log = logging.getLogger(__name__)

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Part types that contain text."""

_text = partial(content_text, types=TEXTS)

CUSTOM_INPUT = "input"  # name of a custom tool's only argument

CUSTOM_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
)


def chat_messages(request: ResponseRequest) -> tuple[ChatMessage, ...]:
    """Convert a conversation to the engine's messages.

    Raises:
        Refusal: an item or part is not supported.
    """
    messages = [ChatMessage("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return (*messages, ChatMessage("user", request.input))
    called: dict[str, str] = {}  # tool names by call id
    for at, item in enumerate(request.input):
        message = _message(item, f"input[{at}]", called)
        if messages and message.role == messages[-1].role == "assistant":
            message = _joined(messages.pop(), message)
        messages.append(message)
    return tuple(messages)


def _message(item: InputItem, place: str, called: dict[str, str]) -> ChatMessage:
    if item.type == "message":
        role = ROLES.get(item.role, item.role) or "user"
        text, pictures = shown_content(item.content, f"{place}.content", TEXTS)
        return ChatMessage(role, text, pictures=pictures)
    if item.type == "reasoning":
        text = _text(item.content, f"{place}.content") or _text(item.summary, f"{place}.summary")
        return ChatMessage("assistant", "", reasoning=text)
    if item.type in ("function_call", "custom_tool_call"):
        called[item.call_id] = item.name
        custom = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
        arguments = item.arguments or "{}" if item.type == "function_call" else custom
        call = ToolCall(item.name, arguments, item.call_id)
        return ChatMessage("assistant", "", tool_calls=(call,))
    if item.type in ("function_call_output", "custom_tool_call_output"):
        text, name = _text(item.output, f"{place}.output"), called.get(item.call_id, "")
        return ChatMessage("tool", text, tool_call_id=item.call_id, name=name)
    text = "{place} has the type {type}, which is not supported."
    raise bad_value(f"{place}.type", text, place=place, type=repr(item.type[:40]))


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        content="\n".join(filter(None, (first.content, second.content))),
        reasoning="\n".join(filter(None, (first.reasoning, second.reasoning))),
        tool_calls=first.tool_calls + second.tool_calls,
    )


def parameter_places(tools: Sequence[ResponseTool]) -> dict[str, str]:
    """Return the places of the tools' argument schemas in the request, by tool name."""
    return {tool.name: f"tools[{at}].parameters" for at, tool in enumerate(tools)}


def offered_tools(tools: Sequence[ResponseTool]) -> tuple[Tool, ...]:
    """Return the tools for the model, without server-side tools such as web search."""
    offered = []
    for tool in tools:
        if tool.type == "function":
            offered.append(described_tool(tool.name, tool.description, tool.parameters))
        elif tool.type == "custom":
            offered.append(Tool(tool.name, _custom_description(tool), CUSTOM_SCHEMA))
        else:
            log.warning("ignored a tool of type %.40r", tool.type)
    return tuple(offered)


def _custom_description(tool: ResponseTool) -> str:
    grammar = (tool.format or {}).get("definition")
    return f"{tool.description}\n\nIts input:\n{grammar}" if grammar else tool.description


def custom_names(tools: Sequence[ResponseTool]) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.name for tool in tools if tool.type == "custom")


def tool_choice(request: ResponseRequest) -> str:
    """Return the value for `AnswerRequest.tool_choice`.

    Raises:
        Refusal: the choice is invalid, or names a tool that does not exist.
    """
    choice = request.tool_choice
    names = [tool.name for tool in request.tools if tool.type in ("function", "custom")]
    if isinstance(choice, ToolPick):
        if choice.name not in names:
            raise bad_value("tool_choice", "tool_choice does not name one of the tools.")
        return f"={choice.name}"
    if choice is not None and choice not in CHOICES:
        text = 'tool_choice must be "none", "auto", "required" or a tool.'
        raise bad_value("tool_choice", text)
    if choice == "required" and not names:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return choice or "auto"
