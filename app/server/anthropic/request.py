"""Requests of the Messages protocol, as Anthropic documents them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.server.openai.conversation import (
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
    """A part of the result of a tool; only texts can be read."""

    type: str = body_field('"text"; pictures are refused.')
    text: str = body_field("The text.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """A picture."""

    type: str = body_field('"base64"; addresses are not fetched.')
    media_type: str = body_field("Without effect: the file itself says what it is.", "")
    data: str = body_field("The picture's file as base64.", "", is_file=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBlock:
    """A part of a message: a text, a picture, a thought, a call of a tool, or its result."""

    type: str = body_field('"text", "image", "thinking", "tool_use" or "tool_result".')
    source: PictureSource | None = body_field("The picture.", None)
    text: str = body_field("The text.", "")
    thinking: str = body_field("What the assistant has thought.", "")
    signature: str = body_field("Without effect.", "")
    data: str = body_field("Without effect: a thought that nobody can read.", "")
    id: str = body_field("Name of the call.", "")
    name: str = body_field("Name of the tool that is called.", "")
    input: JsonObject | None = body_field("Arguments of the call.", None)
    tool_use_id: str = body_field("Name of the call whose result this is.", "")
    content: str | tuple[ResultBlock, ...] | None = body_field("The result of a call.", None)
    is_error: bool | None = body_field(
        "Whether the call has failed, which the model is told.", None
    )
    cache_control: JsonObject | None = body_field(
        "Without effect: prompts are always cached.", None
    )
    citations: tuple[JsonObject, ...] | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTurn:
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = body_field("Who speaks.")
    content: str | tuple[MessageBlock, ...] = body_field("A text, or its parts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool that the model may call."""

    name: str = body_field("Name of the tool.")
    type: str = body_field('"custom"; tools that run on the server are refused.', "custom")
    description: str = body_field("What it does, for the model.", "")
    input_schema: JsonObject | None = body_field("JSON schema of its arguments.", None)
    strict: bool | None = body_field("Without effect: a schema always holds.", None)
    cache_control: JsonObject | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWish:
    """The choice of the tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"] = body_field(
        "None, any, at least one, or this one."
    )
    name: str = body_field("Name of the tool that must be called.", "")
    disable_parallel_tool_use: bool = body_field("Whether one call ends the answer.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingWish:
    """The wish that the model thinks before it answers, or does not."""

    type: Literal["enabled", "disabled", "adaptive"] = body_field(
        "Adaptive is the same as enabled."
    )
    budget_tokens: int | None = body_field("Without effect.", None)
    display: str = body_field("Without effect.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The form that an answer must have."""

    type: Literal["json_schema"] = body_field("JSON.")
    schema: JsonObject = body_field("JSON schema of the answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The form of an answer, and how much the model thinks."""

    format: OutputFormat | None = body_field("The form of the answer.", None)
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = body_field(
        "How much the model thinks, if it can.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation with its tools, whose tokens can be counted."""

    model: str = body_field("Name of the model; any that is loaded if it is empty.")
    messages: tuple[MessageTurn, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    system: str | tuple[MessageBlock, ...] = body_field("What the model is told before.", "")
    tools: tuple[ToolOffer, ...] = body_field("What the model may call.", (), most=MAX_TOOLS)
    tool_choice: ToolWish | None = body_field("Which tools it may or must call.", None)
    thinking: ThinkingWish | None = body_field("Whether it thinks; if not said, as it likes.", None)
    output_config: OutputConfig | None = body_field("The form of the answer.", None)
    output_format: OutputFormat | None = body_field("The same as output_config.format.", None)
    cache_control: JsonObject | None = body_field("Without effect.", None)
    context_management: JsonObject | None = body_field("Without effect.", None)
    mcp_servers: tuple[JsonObject, ...] = body_field("Refused, unless it is empty.", ())
    container: str | JsonObject | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(AskedConversation):
    """A request for an answer."""

    max_tokens: int = body_field("Most tokens of the answer.", least=1, most=2**31 - 1)
    stop_sequences: tuple[str, ...] = body_field(
        "The answer ends before any of these texts.", (), most=MAX_STOPS
    )
    stream: bool = body_field("Send the answer as it is written.", default=False)
    temperature: float | None = body_field("Higher is more varied.", None, least=0, most=5)
    top_p: float | None = body_field("Share of the likeliest tokens.", None, least=0, most=1)
    top_k: int | None = body_field("Number of likeliest tokens.", None, least=0, most=2**31 - 1)
    metadata: JsonObject | None = body_field("Without effect.", None)
    service_tier: str = body_field("Without effect.", "")
    speed: str = body_field("Without effect.", "")
    inference_geo: str | None = body_field("Without effect.", None)


CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Choices of tools that name none, as the engine has them."""


def chat_messages(request: AskedConversation) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation, what the model is told before them first.

    Raises:
        Refusal: one has something that is no text.
    """
    found: list[ChatMessage] = []
    if request.system:
        found.append(ChatMessage("system", _text(request.system, "system")))
    called: dict[str, str] = {}  # names of tools by the calls' names
    for at, turn in enumerate(request.messages):
        place = f"messages[{at}].content"
        if isinstance(turn.content, str):
            found.append(ChatMessage(turn.role, turn.content))
        elif turn.role == "assistant":
            found.append(_answer(turn.content, place, called))
        else:
            found += _question(turn, turn.content, place, called)
    return tuple(found)


def _answer(blocks: Sequence[MessageBlock], place: str, called: dict[str, str]) -> ChatMessage:
    """Return the assistant's message of some blocks; `called` gets its calls."""
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
    """Return the messages of a person's blocks: a tool's result is a message of its own."""
    found, shown = list[ChatMessage](), ShownParts()
    for at, block in enumerate(blocks):
        if block.type == "image":
            _show(block, f"{place}[{at}]", shown)
            continue
        if block.type != "tool_result":
            shown.add_text(_text_of(block, f"{place}[{at}]"))
            continue
        text = "" if block.content is None else _text(block.content, f"{place}[{at}].content")
        if block.is_error:
            text = f"Error: {text}"
        name = called.get(block.tool_use_id, "")
        found.append(ChatMessage("tool", text, tool_call_id=block.tool_use_id, name=name))
    if shown.has_any or not found:
        found.append(ChatMessage(turn.role, shown.text, pictures=shown.pictures))
    return found


def _show(block: MessageBlock, place: str, shown: ShownParts) -> None:
    """Add the picture of a block.

    Raises:
        Refusal: it is an address.
    """
    if block.source is None or block.source.type != "base64":
        raise bad_value(f"{place}.source", f"{place}.source must be base64; nothing is fetched.")
    shown.add_file(block.source.data)


def _text(content: str | Sequence[MessageBlock | ResultBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(block, f"{place}[{at}]") for at, block in enumerate(content))


def _text_of(block: MessageBlock | ResultBlock, place: str) -> str:
    if block.type == "text":
        return block.text
    raise bad_value(
        f"{place}.type", f"{place} has the type {block.type[:40]!r}, which cannot stand there."
    )


def offered_tools(offers: Sequence[ToolOffer]) -> tuple[Tool, ...]:
    """Return the functions that the model may call.

    Raises:
        Refusal: a tool is one that the server would have to run.
    """
    found = []
    for at, offer in enumerate(offers):
        if offer.type != "custom":
            text = f"tools[{at}] is of the type {offer.type[:40]!r}, which only its maker can run."
            raise bad_value(f"tools[{at}]", text)
        found.append(described_tool(offer.name, offer.description, offer.input_schema))
    return tuple(found)


def tool_choice(request: AskedConversation) -> str:
    """Return which tools the model may or must call, as `AnswerRequest.tool_choice` has it.

    Raises:
        Refusal: it is a tool that is not offered.
    """
    wish = request.tool_choice
    if wish is None:
        return "auto"
    names = [offer.name for offer in request.tools]
    if wish.type == "tool" and wish.name not in names:
        raise bad_value("tool_choice", "tool_choice names no tool among those offered.")
    if wish.type == "any" and not names:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return CHOICES.get(wish.type, f"={wish.name}")


def form_of(request: AskedConversation) -> Grammar | None:
    """Return the form that the answer must have; None for any."""
    form = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        form = request.output_config.format
    return None if form is None else json_form(form.schema)


def field_places(request: AskedConversation) -> FieldPlaces:
    """Return the places of the schemas in a request."""
    config = request.output_config
    is_older = config is None or config.format is None
    form = "output_format.schema" if is_older else "output_config.format.schema"
    tools = {offer.name: f"tools[{at}].input_schema" for at, offer in enumerate(request.tools)}
    return FieldPlaces(form, tools)
