"""Requests for chat completions, as OpenAI documents them, with Tandem's own fields beside."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from app.server.openai.sampling import SamplingFields
from app.server.refusal import bad_value
from app.server.request_fields import body_field
from engine import IMAGE_PLACEHOLDER, ChatMessage, Grammar, JsonObject, Tool, ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_MESSAGES = 10_000
"""Largest number of messages of a conversation."""

MAX_TOOLS = 512
"""Largest number of functions that a request may offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureAddress:
    """Where a picture is."""

    url: str = body_field(
        "The picture itself as a data URI; other addresses are not fetched.", is_file=True
    )
    detail: str | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """A part of a message: a text or a picture."""

    type: str = body_field('"text", "image_url" or "input_image"; sounds are refused.')
    text: str = body_field("The text.", "")
    image_url: PictureAddress | str | None = body_field(
        "The picture, or its data URI.", None, is_file=True
    )
    refusal: str = body_field("Text of a part of the type refusal.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """A function that the assistant has called, with its arguments."""

    name: str = body_field("Name of the function.")
    arguments: str | JsonObject = body_field("Text of a JSON object.", "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTurn:
    """A call in an earlier answer."""

    function: CalledFunction = body_field("The function and its arguments.")
    id: str = body_field("Name of the call.", "")
    type: str = body_field('"function".', "function")
    index: int | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A message of the conversation."""

    role: Role = body_field("Who speaks; developer is the same as system.")
    content: str | tuple[ContentPart, ...] | None = body_field("A text, or texts one by one.", None)
    name: str = body_field("Name of the function whose result this is.", "")
    tool_calls: tuple[ToolCallTurn, ...] = body_field("What the assistant called.", ())
    tool_call_id: str = body_field("The call whose result this is.", "")
    reasoning_content: str = body_field("What the assistant thought before its answer.", "")
    reasoning: str = body_field("The same as reasoning_content.", "")
    refusal: str = body_field("Text with which the assistant refused.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedFunction:
    """A function that the model may call."""

    name: str = body_field("Name of the function.")
    description: str = body_field("What it does, for the model.", "")
    parameters: JsonObject | None = body_field("JSON schema of its arguments.", None)
    strict: bool | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool; only functions can be offered."""

    type: str = body_field('"function".', "function")
    function: OfferedFunction | None = body_field("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionName:
    """The name of a function that must be called."""

    name: str = body_field("Name of the function.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedChoice:
    """The choice of one function, which the model must call."""

    type: str = body_field('"function".', "function")
    function: FunctionName | None = body_field("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchema:
    """The JSON schema that an answer must have."""

    name: str = body_field("Without effect.", "")
    description: str = body_field("Without effect.", "")
    schema: JsonObject | None = body_field("The schema; none is any object.", None)
    strict: bool | None = body_field("Without effect: a schema always holds.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = body_field("Any text, or JSON.")
    json_schema: NamedSchema | None = body_field("The schema, for the type json_schema.", None)
    schema: JsonObject | None = body_field("A schema for the type json_object.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Further content of a stream, beside the answer."""

    include_usage: bool = body_field("Send the numbers of tokens at the end.", default=False)
    include_obfuscation: bool | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCompletion(SamplingFields):
    """Fields that requests for chat completions and for completions share."""

    model: str = body_field("Name of the model; any that is loaded if it is empty.", "")
    stream: bool = body_field("Send the answer as it is written.", default=False)
    stream_options: StreamOptions | None = body_field("What the stream has beside it.", None)
    user: str = body_field("Without effect.", "")
    response_format: ResponseFormat | None = body_field("The form of the answer.", None)
    grammar: str = body_field("A grammar of the answer in GBNF.", "")
    regex: str = body_field("A regular expression that the answer matches.", "")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(AnyCompletion):
    """A request for chat completions."""

    messages: tuple[ChatTurn, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    max_completion_tokens: int | None = body_field(
        "Most tokens of the answer, thoughts included.", None, least=-1, most=2**31 - 1
    )
    logprobs: bool = body_field("Tell how likely each token was.", default=False)
    top_logprobs: int | None = body_field(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    tools: tuple[OfferedTool, ...] = body_field("What the model may call.", (), most=MAX_TOOLS)
    tool_choice: str | NamedChoice | None = body_field(
        '"none", "auto", "required", or a function that must be called.', None
    )
    parallel_tool_calls: bool = body_field("Whether several calls may come.", default=False)
    reasoning_effort: Effort | None = body_field("How much the model thinks, if it can.", None)
    chat_template_kwargs: JsonObject | None = body_field("Variables for the chat template.", None)
    continue_final_message: bool = body_field(
        "Go on with the last message, which is the assistant's.", default=False
    )
    add_generation_prompt: bool | None = body_field("Without effect: see the field above.", None)
    modalities: tuple[str, ...] = body_field("Only text can be written.", ())
    audio: JsonObject | None = body_field("Refused.", None)
    functions: tuple[JsonObject, ...] = body_field("Refused; tools have taken its place.", ())
    function_call: str | JsonObject | None = body_field("Refused, as functions are.", None)
    web_search_options: JsonObject | None = body_field("Refused.", None)
    metadata: JsonObject | None = body_field("Without effect.", None)
    store: bool | None = body_field("Without effect: nothing is stored.", None)
    prediction: JsonObject | None = body_field("Without effect.", None)
    service_tier: str = body_field("Without effect.", "")
    verbosity: str = body_field("Without effect.", "")
    safety_identifier: str = body_field("Without effect.", "")
    prompt_cache_key: str = body_field("Without effect: prompts are always cached.", "")
    prompt_cache_retention: str = body_field("Without effect.", "")


_DATA = re.compile(r"data:[a-z]+/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class ShownParts:
    """Text and pictures of a message, made of its parts in order.

    Attributes:
        text: the text, with a mark where each picture stands.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pictures: list[str] = []
        self._is_behind_text = False

    @property
    def has_any(self) -> bool:
        """Whether a part was added."""
        return self._is_behind_text or bool(self._pictures)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Files of the pictures as base64, in order."""
        return tuple(self._pictures)

    def add_text(self, text: str) -> None:
        """Add a text; between two texts is a line break."""
        text = text.replace(IMAGE_PLACEHOLDER, "")
        self.text += ("\n" if self._is_behind_text else "") + text
        self._is_behind_text = True

    def add_file(self, data: str) -> None:
        """Add a picture's file as base64."""
        self.text += IMAGE_PLACEHOLDER
        self._pictures.append(data)
        self._is_behind_text = False

    def add_address(self, url: str, place: str) -> None:
        """Add the picture of a data URI.

        Raises:
            Refusal: the address is another one; nothing is fetched for a client.
        """
        found = _DATA.match(url)
        if found is None:
            raise bad_value(
                place, f"{place} must be a data URI such as data:image/png;base64,...; this server "
                "fetches no other addresses.",
            )  # fmt: skip
        self.add_file(url[found.end() :])


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
    """Return which tools the model may or must call, as `AnswerRequest.tool_choice` has it.

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


ANY_OBJECT = '{"type": "object"}'
"""JSON schema of an object with anything inside."""


def form_of(request: AnyCompletion) -> Grammar | None:
    """Return the form that the answer must have; None for any.

    Raises:
        Refusal: the request asks for several.
    """
    forms = []
    if request.grammar:
        forms.append(Grammar("gbnf", request.grammar))
    if request.regex:
        forms.append(Grammar("regex", request.regex))
    if request.response_format is not None and request.response_format.type != "text":
        forms.append(json_form(_schema(request.response_format)))
    if len(forms) > 1:
        raise bad_value(
            "response_format", "Only one of response_format, grammar and regex can be asked for."
        )
    return forms[0] if forms else None


def form_place(request: AnyCompletion) -> str:
    """Return the place of the form that the answer must have."""
    for name in ("grammar", "regex"):
        if getattr(request, name):
            return name
    form = request.response_format
    is_named = form is not None and form.type == "json_schema"
    return "response_format.json_schema.schema" if is_named else "response_format.schema"


def _schema(form: ResponseFormat) -> JsonObject | None:
    """Return the JSON schema of a form; None for any object."""
    if form.type != "json_schema":
        return form.schema
    if form.json_schema is None:
        place = "response_format.json_schema"
        raise bad_value(place, f"{place} is missing.")
    return form.json_schema.schema


def json_form(schema: JsonObject | None) -> Grammar:
    """Return the form of JSON with a schema, or of any object."""
    text = ANY_OBJECT if schema is None else json.dumps(schema, ensure_ascii=False)
    return Grammar("json_schema", text)
