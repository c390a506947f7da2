"""Requests in Anthropic's Messages protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.server.openai.conversation import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOOLS,
    ShownParts,
    described_tool,
    json_form,
)
from app.server.openai.sampling import MAX_STOPS
from app.server.refusal import FieldPlaces, bad_value
from app.server.request_fields import body_field
from engine import ChatMessage, Grammar, JsonObject, Tool, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultBlock:
    """A part of a tool's result; only text is supported."""

    type: str = body_field('"text"; images are rejected.')
    text: str = body_field("The text.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """An image."""

    type: str = body_field('"base64"; URLs are not fetched.')
    media_type: str = body_field("Ignored; the format is detected from the file.", "")
    data: str = body_field("The image file, base64-encoded.", "", is_file=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBlock:
    """A content block: text, an image, reasoning, a tool call or a tool result."""

    type: str = body_field('"text", "image", "thinking", "tool_use" or "tool_result".')
    source: PictureSource | None = body_field("The image.", None)
    text: str = body_field("The text.", "")
    thinking: str = body_field("Earlier reasoning by the assistant.", "")
    signature: str = body_field(IGNORED, "")
    data: str = body_field("Redacted reasoning; ignored.", "")
    id: str = body_field("Id of the tool call.", "")
    name: str = body_field("Name of the called tool.", "")
    input: JsonObject | None = body_field("Arguments for the call.", None)
    tool_use_id: str = body_field("Id of the call that this result belongs to.", "")
    content: str | tuple[ResultBlock, ...] | None = body_field("Result of the call.", None)
    is_error: bool | None = body_field(
        "Whether the call failed; this is passed on to the model.", None
    )
    cache_control: JsonObject | None = body_field("Ignored; prompts are always cached.", None)
    citations: tuple[JsonObject, ...] | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTurn:
    """A message in the conversation."""

    role: Literal["user", "assistant", "system"] = body_field("Author of the message.")
    content: str | tuple[MessageBlock, ...] = body_field("Text or content blocks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool that the model may call."""

    name: str = body_field("Name of the tool.")
    type: str = body_field('"custom"; server-side tools are rejected.', "custom")
    description: str = body_field("Description for the model.", "")
    input_schema: JsonObject | None = body_field("JSON schema for the arguments.", None)
    strict: bool | None = body_field("Ignored; schemas are always enforced.", None)
    cache_control: JsonObject | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWish:
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"] = body_field(
        "Whether tool calls are optional (auto), required (any, tool) or disabled (none)."
    )
    name: str = body_field("Name of the required tool.", "")
    disable_parallel_tool_use: bool = body_field("Stop after one tool call.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingWish:
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"] = body_field(
        "Adaptive has the same effect as enabled."
    )
    budget_tokens: int | None = body_field(IGNORED, None)
    display: str = body_field(IGNORED, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Structured output."""

    type: Literal["json_schema"] = body_field("JSON.")
    schema: JsonObject = body_field("JSON schema for the answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Structured output and reasoning effort."""

    format: OutputFormat | None = body_field("Structured output.", None)
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = body_field(
        "Reasoning effort, if the model supports it.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation with its tools."""

    model: str = body_field("Name of the model; empty for the loaded one.")
    messages: tuple[MessageTurn, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    system: str | tuple[MessageBlock, ...] = body_field("System prompt.", "")
    tools: tuple[ToolOffer, ...] = body_field("Tools for the model.", (), most=MAX_TOOLS)
    tool_choice: ToolWish | None = body_field("Which tools the model may or must call.", None)
    thinking: ThinkingWish | None = body_field("Reasoning; the model's default if omitted.", None)
    output_config: OutputConfig | None = body_field("Structured output and effort.", None)
    output_format: OutputFormat | None = body_field("Alias for output_config.format.", None)
    cache_control: JsonObject | None = body_field(IGNORED, None)
    context_management: JsonObject | None = body_field(IGNORED, None)
    mcp_servers: tuple[JsonObject, ...] = body_field("Must be empty.", ())
    container: str | JsonObject | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(AskedConversation):
    """A request for an answer."""

    max_tokens: int = body_field("Maximum number of tokens in the answer.", least=1, most=2**31 - 1)
    stop_sequences: tuple[str, ...] = body_field(
        "The answer stops before any of these texts.", (), most=MAX_STOPS
    )
    stream: bool = body_field("Stream the answer.", default=False)
    temperature: float | None = body_field("Sampling temperature.", None, least=0, most=5)
    top_p: float | None = body_field("Top-p (nucleus) sampling.", None, least=0, most=1)
    top_k: int | None = body_field("Top-k sampling.", None, least=0, most=2**31 - 1)
    metadata: JsonObject | None = body_field(IGNORED, None)
    service_tier: str = body_field(IGNORED, "")
    speed: str = body_field(IGNORED, "")
    inference_geo: str | None = body_field(IGNORED, None)


CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Values for `AnswerRequest.tool_choice` by type of choice."""


def chat_messages(request: AskedConversation) -> tuple[ChatMessage, ...]:
    """Convert a conversation to the engine's messages, starting with the system prompt.

    Raises:
        Refusal: a content block is not supported.
    """
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage("system", _text(request.system, "system")))
    called: dict[str, str] = {}  # tool names by call id
    for at, turn in enumerate(request.messages):
        place = f"messages[{at}].content"
        if isinstance(turn.content, str):
            messages.append(ChatMessage(turn.role, turn.content))
        elif turn.role == "assistant":
            messages.append(_answer(turn.content, place, called))
        else:
            messages += _question(turn, turn.content, place, called)
    return tuple(messages)


def _answer(blocks: Sequence[MessageBlock], place: str, called: dict[str, str]) -> ChatMessage:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(ToolCall(block.name, arguments, block.id))
            called[block.id] = block.name
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(_text_of(block, f"{place}[{at}]"))
    return ChatMessage(
        "assistant", "\n".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls)
    )


def _question(
    turn: MessageTurn, blocks: Sequence[MessageBlock], place: str, called: dict[str, str]
) -> list[ChatMessage]:
    messages, shown = list[ChatMessage](), ShownParts()
    for at, block in enumerate(blocks):
        if block.type == "image":
            _add_image(block, f"{place}[{at}]", shown)
            continue
        if block.type != "tool_result":
            shown.add_text(_text_of(block, f"{place}[{at}]"))
            continue
        text = "" if block.content is None else _text(block.content, f"{place}[{at}].content")
        if block.is_error:
            text = f"Error: {text}"
        name = called.get(block.tool_use_id, "")
        messages.append(ChatMessage("tool", text, tool_call_id=block.tool_use_id, name=name))
    if shown.has_any or not messages:
        messages.append(ChatMessage(turn.role, shown.text, pictures=shown.pictures))
    return messages


def _add_image(block: MessageBlock, place: str, shown: ShownParts) -> None:
    if block.source is None or block.source.type != "base64":
        text = "{place}.source must be base64; URLs are not fetched."
        raise bad_value(f"{place}.source", text, place=place)
    shown.add_file(block.source.data)


def _text(content: str | Sequence[MessageBlock | ResultBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(block, f"{place}[{at}]") for at, block in enumerate(content))


def _text_of(block: MessageBlock | ResultBlock, place: str) -> str:
    if block.type == "text":
        return block.text
    text = "{place} has the type {type}, which is not allowed here."
    raise bad_value(f"{place}.type", text, place=place, type=repr(block.type[:40]))


def offered_tools(offers: Sequence[ToolOffer]) -> tuple[Tool, ...]:
    """Return the tools for the model.

    Raises:
        Refusal: a tool would have to run on the server.
    """
    for at, offer in enumerate(offers):
        if offer.type != "custom":
            text = "tools[{at}] has the type {type}, which this server cannot run."
            raise bad_value(f"tools[{at}]", text, at=at, type=repr(offer.type[:40]))
    return tuple(
        described_tool(offer.name, offer.description, offer.input_schema) for offer in offers
    )


def tool_choice(request: AskedConversation) -> str:
    """Return the value for `AnswerRequest.tool_choice`.

    Raises:
        Refusal: the choice names a tool that does not exist, or requires a call without tools.
    """
    choice = request.tool_choice
    if choice is None:
        return "auto"
    names = [offer.name for offer in request.tools]
    if choice.type == "tool" and choice.name not in names:
        raise bad_value("tool_choice", "tool_choice does not name one of the tools.")
    if choice.type == "any" and not names:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return CHOICES.get(choice.type, f"={choice.name}")


def form_of(request: AskedConversation) -> Grammar | None:
    """Return the grammar for the structured output, if any."""
    form = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        form = request.output_config.format
    return None if form is None else json_form(form.schema)


def field_places(request: AskedConversation) -> FieldPlaces:
    """Return the places of schemas in a request."""
    config = request.output_config
    is_older = config is None or config.format is None
    form = "output_format.schema" if is_older else "output_config.format.schema"
    tools = {offer.name: f"tools[{at}].input_schema" for at, offer in enumerate(request.tools)}
    return FieldPlaces(form, tools)
