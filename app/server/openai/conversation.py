"""Chat completion requests in OpenAI's protocol, with Tandem's own fields."""

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
MAX_TOOLS = 512
IGNORED = "Accepted for compatibility; ignored."  # description for fields without effect


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureAddress:
    """An image URL."""

    url: str = body_field("A data URI; other URLs are not fetched.", is_file=True)
    detail: str | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """A part of a message: text or an image."""

    type: str = body_field('"text", "image_url" or "input_image"; audio is rejected.')
    text: str = body_field("The text.", "")
    image_url: PictureAddress | str | None = body_field(
        "The image, or its data URI.", None, is_file=True
    )
    refusal: str = body_field("Text of a refusal part.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """A function call by the assistant."""

    name: str = body_field("Name of the function.")
    arguments: str | JsonObject = body_field("Arguments: a JSON object, as text.", "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTurn:
    """A tool call in an earlier answer."""

    function: CalledFunction = body_field("The function and its arguments.")
    id: str = body_field("Id of the call.", "")
    type: str = body_field('"function".', "function")
    index: int | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A message in the conversation."""

    role: Role = body_field("Author; developer has the same effect as system.")
    content: str | tuple[ContentPart, ...] | None = body_field("Text or content parts.", None)
    name: str = body_field("Name of the function that this result belongs to.", "")
    tool_calls: tuple[ToolCallTurn, ...] = body_field("Tool calls by the assistant.", ())
    tool_call_id: str = body_field("Id of the call that this result belongs to.", "")
    reasoning_content: str = body_field("Earlier reasoning by the assistant.", "")
    reasoning: str = body_field("Alias for reasoning_content.", "")
    refusal: str = body_field("Text of a refusal.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedFunction:
    """A function that the model may call."""

    name: str = body_field("Name of the function.")
    description: str = body_field("Description for the model.", "")
    parameters: JsonObject | None = body_field("JSON schema for the arguments.", None)
    strict: bool | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool; only functions are supported."""

    type: str = body_field('"function".', "function")
    function: OfferedFunction | None = body_field("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionName:
    """The function that must be called."""

    name: str = body_field("Name of the function.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedChoice:
    """The tool that the model must call."""

    type: str = body_field('"function".', "function")
    function: FunctionName | None = body_field("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchema:
    """The JSON schema for an answer."""

    name: str = body_field(IGNORED, "")
    description: str = body_field(IGNORED, "")
    schema: JsonObject | None = body_field("The schema; any object if omitted.", None)
    strict: bool | None = body_field("Ignored; schemas are always enforced.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """Structured output."""

    type: Literal["text", "json_object", "json_schema"] = body_field("Any text, or JSON.")
    json_schema: NamedSchema | None = body_field("The schema for type json_schema.", None)
    schema: JsonObject | None = body_field("A schema for type json_object.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options for a stream."""

    include_usage: bool = body_field("Send the token usage at the end.", default=False)
    include_obfuscation: bool | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCompletion(SamplingFields):
    """Fields that chat completion and completion requests share."""

    model: str = body_field("Name of the model; empty for the loaded one.", "")
    stream: bool = body_field("Stream the answer.", default=False)
    stream_options: StreamOptions | None = body_field("Options for the stream.", None)
    user: str = body_field(IGNORED, "")
    response_format: ResponseFormat | None = body_field("Structured output.", None)
    grammar: str = body_field("A GBNF grammar that the answer must match.", "")
    regex: str = body_field("A regular expression that the answer must match.", "")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(AnyCompletion):
    """A chat completion request."""

    messages: tuple[ChatTurn, ...] = body_field("The conversation.", least=1, most=MAX_MESSAGES)
    max_completion_tokens: int | None = body_field(
        "Maximum number of tokens in the answer, including reasoning.",
        None,
        least=-1,
        most=2**31 - 1,
    )
    logprobs: bool = body_field("Return the tokens' logprobs.", default=False)
    top_logprobs: int | None = body_field(
        "Number of top logprobs per token.", None, least=0, most=20
    )
    tools: tuple[OfferedTool, ...] = body_field("Tools for the model.", (), most=MAX_TOOLS)
    tool_choice: str | NamedChoice | None = body_field(
        '"none", "auto", "required", or a function that must be called.', None
    )
    parallel_tool_calls: bool = body_field("Allow several calls.", default=False)
    reasoning_effort: Effort | None = body_field(
        "Reasoning effort, if the model supports it.", None
    )
    chat_template_kwargs: JsonObject | None = body_field("Variables for the chat template.", None)
    continue_final_message: bool = body_field(
        "Continue the last message, which must be the assistant's.", default=False
    )
    add_generation_prompt: bool | None = body_field("Ignored; see continue_final_message.", None)
    modalities: tuple[str, ...] = body_field("Only text is supported.", ())
    audio: JsonObject | None = body_field("Rejected.", None)
    functions: tuple[JsonObject, ...] = body_field("Rejected; use tools.", ())
    function_call: str | JsonObject | None = body_field("Rejected; use tool_choice.", None)
    web_search_options: JsonObject | None = body_field("Rejected.", None)
    metadata: JsonObject | None = body_field(IGNORED, None)
    store: bool | None = body_field("Ignored; nothing is stored.", None)
    prediction: JsonObject | None = body_field(IGNORED, None)
    service_tier: str = body_field(IGNORED, "")
    verbosity: str = body_field(IGNORED, "")
    safety_identifier: str = body_field(IGNORED, "")
    prompt_cache_key: str = body_field("Ignored; prompts are always cached.", "")
    prompt_cache_retention: str = body_field(IGNORED, "")


_DATA = re.compile(r"data:[a-z]+/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class ShownParts:
    """A message's text and images, collected from its parts in order.

    Attributes:
        text: the text, with a placeholder for each image.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pictures: list[str] = []
        self._follows_text = False

    @property
    def has_any(self) -> bool:
        """Whether any part has been added."""
        return self._follows_text or bool(self._pictures)

    @property
    def pictures(self) -> tuple[str, ...]:
        """The image files in order, base64-encoded."""
        return tuple(self._pictures)

    def add_text(self, text: str) -> None:
        """Add a text, on a new line if it follows another text."""
        text = text.replace(IMAGE_PLACEHOLDER, "")
        self.text += ("\n" if self._follows_text else "") + text
        self._follows_text = True

    def add_file(self, data: str) -> None:
        """Add an image file, base64-encoded."""
        self.text += IMAGE_PLACEHOLDER
        self._pictures.append(data)
        self._follows_text = False

    def add_address(self, url: str, place: str) -> None:
        """Add the image in a data URI.

        Raises:
            Refusal: the URL is not an image's data URI.
        """
        match = _DATA.match(url)
        if match is None:
            text = (
                "{place} must be a data URI such as data:image/png;base64,...; other URLs are not "
                "fetched."
            )
            raise bad_value(place, text, place=place)
        self.add_file(url[match.end() :])


ROLES = {"developer": "system", "function": "tool"}  # roles that have another name in the engine
PICTURES = ("image_url", "input_image")  # types of image parts
CHOICES = ("none", "auto", "required")


def chat_messages(turns: Sequence[ChatTurn]) -> tuple[ChatMessage, ...]:
    """Convert a conversation to the engine's messages.

    Raises:
        Refusal: a part is not supported.
    """
    messages: list[ChatMessage] = []
    called: dict[str, str] = {}  # function names by call id
    for at, turn in enumerate(turns):
        calls = tuple(map(_call, turn.tool_calls))
        text, pictures = _content(turn, f"messages[{at}].content")
        called |= {call.id: call.name for call in calls}
        messages.append(
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
    return tuple(messages)


def _function_name(turn: ChatTurn, called: dict[str, str]) -> str:
    """Return the name of the function whose result a message contains, or ""."""
    if turn.role not in ("tool", "function"):
        return ""
    return turn.name or called.get(turn.tool_call_id, "")


def _content(turn: ChatTurn, place: str) -> tuple[str, tuple[str, ...]]:
    if turn.content is None:
        if not (turn.tool_calls or turn.role == "assistant"):
            raise bad_value(place, "{place} is missing.", place=place)
        return turn.refusal, ()
    return shown_content(turn.content, place, ("text",))


def shown_content(
    content: str | Sequence[ContentPart] | None, place: str, types: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    """Return the text and images in a message's content.

    Args:
        types: part types that contain text.

    Raises:
        Refusal: a part is not supported.
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
    """Return the text in a message's content, or "".

    Args:
        types: part types that contain text.

    Raises:
        Refusal: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{place}[{at}]", types) for at, part in enumerate(content))


def _part(part: ContentPart, place: str, types: Collection[str]) -> str:
    if part.type in types:
        return part.text
    if part.type == "refusal":
        return part.refusal
    text = "{place} has the type {type}; only text and images are supported."
    raise bad_value(f"{place}.type", text, place=place, type=repr(part.type[:40]))


def _call(call: ToolCallTurn) -> ToolCall:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(call.function.name, arguments or "{}", call.id)


def offered_tools(tools: Sequence[OfferedTool]) -> tuple[Tool, ...]:
    """Return the tools for the model.

    Raises:
        Refusal: a tool is not a function.
    """
    offered = []
    for at, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            text = "tools[{at}] is not a function; other tools are not supported."
            raise bad_value(f"tools[{at}]", text, at=at)
        function = tool.function
        offered.append(described_tool(function.name, function.description, function.parameters))
    return tuple(offered)


def parameter_places(tools: Sequence[OfferedTool]) -> dict[str, str]:
    """Return the places of the functions' argument schemas in the request, by function name."""
    named = ((at, tool.function) for at, tool in enumerate(tools))
    return {
        function.name: f"tools[{at}].function.parameters"
        for at, function in named
        if function is not None
    }


def described_tool(name: str, description: str, schema: JsonObject | None) -> Tool:
    """Return a tool for the model; `schema` is the JSON schema for its arguments, if any."""
    return Tool(name, description, "" if schema is None else json.dumps(schema, ensure_ascii=False))


def tool_choice(request: ChatRequest) -> str:
    """Return the value for `AnswerRequest.tool_choice`.

    Raises:
        Refusal: the choice is invalid, or names a function that does not exist.
    """
    choice = request.tool_choice
    if choice is None:
        return "auto"
    if isinstance(choice, NamedChoice):
        name = "" if choice.function is None else choice.function.name
        names = [tool.function.name for tool in request.tools if tool.function is not None]
        if choice.type != "function" or name not in names:
            raise bad_value("tool_choice", "tool_choice does not name one of the tools.")
        return f"={name}"
    if choice not in CHOICES:
        text = 'tool_choice must be "none", "auto", "required" or a function.'
        raise bad_value("tool_choice", text)
    if choice == "required" and not request.tools:
        raise bad_value("tool_choice", "tool_choice requires a call, but there are no tools.")
    return choice


ANY_OBJECT = '{"type": "object"}'


def form_of(request: AnyCompletion) -> Grammar | None:
    """Return the grammar for the structured output, if any.

    Raises:
        Refusal: the request has several grammars.
    """
    forms = []
    if request.grammar:
        forms.append(Grammar("gbnf", request.grammar))
    if request.regex:
        forms.append(Grammar("regex", request.regex))
    if request.response_format is not None and request.response_format.type != "text":
        forms.append(json_form(_schema(request.response_format)))
    if len(forms) > 1:
        text = "Only one of response_format, grammar and regex is allowed."
        raise bad_value("response_format", text)
    return forms[0] if forms else None


def form_place(request: AnyCompletion) -> str:
    """Return the place of the grammar or schema in the request."""
    for name in ("grammar", "regex"):
        if getattr(request, name):
            return name
    form = request.response_format
    is_named = form is not None and form.type == "json_schema"
    return "response_format.json_schema.schema" if is_named else "response_format.schema"


def _schema(form: ResponseFormat) -> JsonObject | None:
    if form.type != "json_schema":
        return form.schema
    if form.json_schema is None:
        place = "response_format.json_schema"
        raise bad_value(place, "{place} is missing.", place=place)
    return form.json_schema.schema


def json_form(schema: JsonObject | None) -> Grammar:
    """Return the grammar for JSON that matches a schema, or for any JSON object."""
    text = ANY_OBJECT if schema is None else json.dumps(schema, ensure_ascii=False)
    return Grammar("json_schema", text)
