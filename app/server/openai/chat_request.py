"""Requests for chat completions, as OpenAI documents them, with Tandem's own fields beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.server.openai.sampling import SamplingFields
from app.server.requests.reading import JsonObject, asked

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MOST_MESSAGES = 10_000
"""Largest number of messages of a conversation."""

MOST_TOOLS = 512
"""Largest number of functions that a request may offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureAddress:
    """Where a picture is."""

    url: str = asked(
        "The picture itself as a data URI; other addresses are not fetched.", is_file=True
    )
    detail: str | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """A part of a message: a text or a picture."""

    type: str = asked('"text", "image_url" or "input_image"; sounds are refused.')
    text: str = asked("The text.", "")
    image_url: PictureAddress | str | None = asked(
        "The picture, or its data URI.", None, is_file=True
    )
    refusal: str = asked("Text of a part of the type refusal.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """A function that the assistant has called, with its arguments."""

    name: str = asked("Name of the function.")
    arguments: str | JsonObject = asked("Text of a JSON object.", "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTurn:
    """A call in an earlier answer."""

    function: CalledFunction = asked("The function and its arguments.")
    id: str = asked("Name of the call.", "")
    type: str = asked('"function".', "function")
    index: int | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A message of the conversation."""

    role: Role = asked("Who speaks; developer is the same as system.")
    content: str | tuple[ContentPart, ...] | None = asked("A text, or texts one by one.", None)
    name: str = asked("Name of the function whose result this is.", "")
    tool_calls: tuple[ToolCallTurn, ...] = asked("What the assistant called.", ())
    tool_call_id: str = asked("The call whose result this is.", "")
    reasoning_content: str = asked("What the assistant thought before its answer.", "")
    reasoning: str = asked("The same as reasoning_content.", "")
    refusal: str = asked("Text with which the assistant refused.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedFunction:
    """A function that the model may call."""

    name: str = asked("Name of the function.")
    description: str = asked("What it does, for the model.", "")
    parameters: JsonObject | None = asked("JSON schema of its arguments.", None)
    strict: bool | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool; only functions can be offered."""

    type: str = asked('"function".', "function")
    function: OfferedFunction | None = asked("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionName:
    """The name of a function that must be called."""

    name: str = asked("Name of the function.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedChoice:
    """The choice of one function, which the model must call."""

    type: str = asked('"function".', "function")
    function: FunctionName | None = asked("The function.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchema:
    """The JSON schema that an answer must have."""

    name: str = asked("Without effect.", "")
    description: str = asked("Without effect.", "")
    schema: JsonObject | None = asked("The schema; none is any object.", None)
    strict: bool | None = asked("Without effect: a schema always holds.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = asked("Any text, or JSON.")
    json_schema: NamedSchema | None = asked("The schema, for the type json_schema.", None)
    schema: JsonObject | None = asked("A schema for the type json_object.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Further content of a stream, beside the answer."""

    include_usage: bool = asked("Send the numbers of tokens at the end.", default=False)
    include_obfuscation: bool | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCompletion(SamplingFields):
    """Fields that requests for chat completions and for completions share."""

    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    stream: bool = asked("Send the answer as it is written.", default=False)
    stream_options: StreamOptions | None = asked("What the stream has beside it.", None)
    user: str = asked("Without effect.", "")
    response_format: ResponseFormat | None = asked("The form of the answer.", None)
    grammar: str = asked("A grammar of the answer in GBNF.", "")
    regex: str = asked("A regular expression that the answer matches.", "")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(AnyCompletion):
    """A request for chat completions."""

    messages: tuple[ChatTurn, ...] = asked("The conversation.", least=1, most=MOST_MESSAGES)
    max_completion_tokens: int | None = asked(
        "Most tokens of the answer, thoughts included.", None, least=-1, most=2**31 - 1
    )
    logprobs: bool = asked("Tell how likely each token was.", default=False)
    top_logprobs: int | None = asked(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    tools: tuple[OfferedTool, ...] = asked("What the model may call.", (), most=MOST_TOOLS)
    tool_choice: str | NamedChoice | None = asked(
        '"none", "auto", "required", or a function that must be called.', None
    )
    parallel_tool_calls: bool = asked("Whether several calls may come.", default=False)
    reasoning_effort: Effort | None = asked("How much the model thinks, if it can.", None)
    chat_template_kwargs: JsonObject | None = asked("Variables for the chat template.", None)
    continue_final_message: bool = asked(
        "Go on with the last message, which is the assistant's.", default=False
    )
    add_generation_prompt: bool | None = asked("Without effect: see the field above.", None)
    modalities: tuple[str, ...] = asked("Only text can be written.", ())
    audio: JsonObject | None = asked("Refused.", None)
    functions: tuple[JsonObject, ...] = asked("Refused; tools have taken its place.", ())
    function_call: str | JsonObject | None = asked("Refused, as functions are.", None)
    web_search_options: JsonObject | None = asked("Refused.", None)
    metadata: JsonObject | None = asked("Without effect.", None)
    store: bool | None = asked("Without effect: nothing is stored.", None)
    prediction: JsonObject | None = asked("Without effect.", None)
    service_tier: str = asked("Without effect.", "")
    verbosity: str = asked("Without effect.", "")
    safety_identifier: str = asked("Without effect.", "")
    prompt_cache_key: str = asked("Without effect: prompts are always cached.", "")
    prompt_cache_retention: str = asked("Without effect.", "")
