"""Messages and tools of OpenAI's protocol as the engine takes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from app.server.openai.chat_request import (
    ChatRequest,
    ChatTurn,
    ContentPart,
    NamedChoice,
    OfferedTool,
    ToolCallTurn,
)
from app.server.refusal import bad_value
from app.server.requests.pictures import ShownParts
from app.server.requests.reading import JsonObject
from engine import ChatMessage, Tool, ToolCall

ROLES = {"developer": "system", "function": "tool"}
"""Roles that the engine has under another name."""

PICTURES = ("image_url", "input_image")
"""Types of parts that are pictures."""

CHOICES = ("none", "auto", "required")


def chat_messages(turns: Sequence[ChatTurn]) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation.

    Raises:
        Refusal: one has something that is neither a text nor a picture.
    """
    found: list[ChatMessage] = []
    called: dict[str, str] = {}  # names of functions by the calls' names
    for at, turn in enumerate(turns):
        calls = tuple(map(_call, turn.tool_calls))
        text, pictures = _content(turn, f"messages[{at}].content")
        called |= {call.id: call.name for call in calls}
        found.append(
            ChatMessage(
                ROLES.get(turn.role, turn.role),
                text,
                reasoning=turn.reasoning_content or turn.reasoning,
                tool_calls=calls,
                tool_call_id=turn.tool_call_id,
                name=_function_name(turn, called),
                pictures=pictures,
            )
        )
    return tuple(found)


def _function_name(turn: ChatTurn, called: dict[str, str]) -> str:
    """Return the function whose result a message is; "" for other messages."""
    if turn.role not in ("tool", "function"):
        return ""
    return turn.name or called.get(turn.tool_call_id, "")


def _content(turn: ChatTurn, place: str) -> tuple[str, tuple[str, ...]]:
    """Return text and pictures of a message."""
    if turn.content is None:
        if not (turn.tool_calls or turn.role == "assistant"):
            raise bad_value(place, f"{place} is missing.")
        return turn.refusal, ()
    return shown_content(turn.content, place, ("text",))


def shown_content(
    content: str | Sequence[ContentPart] | None, place: str, types: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    """Return text and pictures of a message's content.

    Args:
        types: types of parts that are texts.

    Raises:
        Refusal: a part is neither a text nor a picture, or the picture is elsewhere.
    """
    if content is None or isinstance(content, str):
        return content or "", ()
    shown = ShownParts()
    for at, part in enumerate(content):
        here, address = f"{place}[{at}]", part.image_url
        if part.type in PICTURES:
            url = address if isinstance(address, str) else address.url if address else ""
            shown.add_address(url, f"{here}.image_url")
        else:
            shown.add_text(_part(part, here, types))
    return shown.text, shown.pictures


def content_text(
    content: str | Sequence[ContentPart] | None, place: str, types: Collection[str]
) -> str:
    """Return the text of a message's content; "" for none.

    Args:
        types: types of parts that are texts.

    Raises:
        Refusal: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{place}[{at}]", types) for at, part in enumerate(content))


def _part(part: ContentPart, place: str, types: Collection[str]) -> str:
    if part.type in types:
        return part.text
    if part.type == "refusal":
        return part.refusal
    raise bad_value(
        f"{place}.type",
        f"{place} has the type {part.type[:40]!r}; only texts and pictures are read.",
    )


def _call(call: ToolCallTurn) -> ToolCall:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(call.function.name, arguments or "{}", call.id)


def offered_tools(tools: Sequence[OfferedTool]) -> tuple[Tool, ...]:
    """Return the functions that the model may call.

    Raises:
        Refusal: a tool is no function.
    """
    found = []
    for at, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise bad_value(f"tools[{at}]", f"tools[{at}] is no function; only these are offered.")
        function = tool.function
        found.append(described_tool(function.name, function.description, function.parameters))
    return tuple(found)


def parameter_places(tools: Sequence[OfferedTool]) -> dict[str, str]:
    """Return the places of the schemas of functions' arguments, by the function's name."""
    named = ((at, tool.function) for at, tool in enumerate(tools))
    return {
        function.name: f"tools[{at}].function.parameters"
        for at, function in named
        if function is not None
    }


def described_tool(name: str, description: str, schema: JsonObject | None) -> Tool:
    """Return a function that the model may call.

    Args:
        schema: JSON schema of its arguments; None for no word about them.
    """
    return Tool(name, description, "" if schema is None else json.dumps(schema, ensure_ascii=False))


def tool_choice(request: ChatRequest) -> str:
    """Return which tools the model may or must call, as `Generate.tool_choice` has it.

    Raises:
        Refusal: it is something else, or a tool that is not offered.
    """
    choice = request.tool_choice
    if choice is None:
        return "auto"
    if isinstance(choice, NamedChoice):
        name = "" if choice.function is None else choice.function.name
        names = [tool.function.name for tool in request.tools if tool.function is not None]
        if choice.type != "function" or name not in names:
            raise bad_value("tool_choice", "tool_choice names no function among the tools.")
        return f"={name}"
    if choice not in CHOICES:
        wanted = ", ".join(f'"{one}"' for one in CHOICES)
        raise bad_value("tool_choice", f"tool_choice must be {wanted} or a function.")
    if choice == "required" and not request.tools:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return choice
