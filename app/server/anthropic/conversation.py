"""Conversations and tools of the Messages protocol as the engine takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from app.server.anthropic.message_request import (
    AskedConversation,
    MessageBlock,
    MessageTurn,
    ResultBlock,
    ToolOffer,
)
from app.server.openai.forms import json_form
from app.server.openai.messages import described_tool
from app.server.refusal import FieldPlaces, bad_value
from app.server.requests.pictures import ShownParts
from engine import ChatMessage, Grammar, Tool, ToolCall

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
    """Return which tools the model may or must call, as `Generate.tool_choice` has it.

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
    asked = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        asked = request.output_config.format
    return None if asked is None else json_form(asked.schema)


def field_places(request: AskedConversation) -> FieldPlaces:
    """Return the places of the schemas in a request."""
    config = request.output_config
    is_older = config is None or config.format is None
    form = "output_format.schema" if is_older else "output_config.format.schema"
    tools = {offer.name: f"tools[{at}].input_schema" for at, offer in enumerate(request.tools)}
    return FieldPlaces(form, tools)
