"""Requests of the Responses protocol, as OpenAI documents them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.server.openai.chat_request import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ContentPart,
    Effort,
    StreamOptions,
)
from app.server.requests.reading import JsonObject, asked


@dataclass(frozen=True, slots=True, kw_only=True)
class InputItem:
    """An item of the conversation: a message, a thought, a call of a tool, or its result."""

    type: str = asked("Kind of the item.", "message")
    role: Literal["", "system", "developer", "user", "assistant"] = asked("Who speaks.", "")
    content: str | tuple[ContentPart, ...] | None = asked("A text, or its parts.", None)
    call_id: str = asked("Name of the call.", "")
    name: str = asked("Name of the tool that was called.", "")
    arguments: str = asked("Text of a JSON object.", "")
    input: str = asked("What a custom tool was called with.", "")
    output: str | tuple[ContentPart, ...] | None = asked("Result of the call.", None)
    summary: tuple[ContentPart, ...] = asked("The thought in short.", ())
    encrypted_content: str | None = asked("Without effect.", None)
    id: str | None = asked("Without effect.", None)
    status: str | None = asked("Without effect.", None)
    phase: str | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """A tool that the model may call."""

    type: str = asked('"function" or "custom"; tools of other kinds are not offered to the model.')
    name: str = asked("Name of the tool.", "")
    description: str = asked("What it does, for the model.", "")
    parameters: JsonObject | None = asked("JSON schema of its arguments.", None)
    strict: bool | None = asked("Without effect: a schema always holds.", None)
    format: JsonObject | None = asked("Form of a custom tool's input, told to the model.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPick:
    """The choice of one tool, which the model must call."""

    type: str = asked('"function" or "custom".')
    name: str = asked("Name of the tool.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = asked("Any text, or JSON.")
    name: str = asked("Without effect.", "")
    description: str = asked("Without effect.", "")
    schema: JsonObject | None = asked("The schema; none is any object.", None)
    strict: bool | None = asked("Without effect: a schema always holds.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the text of an answer."""

    format: TextFormat | None = asked("The form of the answer.", None)
    verbosity: str | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningWish:
    """The wish for how much the model thinks."""

    effort: Effort | None = asked("How much the model thinks, if it can.", None)
    summary: str | None = asked("Without effect: thoughts come as they are.", None)
    generate_summary: str | None = asked("Without effect.", None)
    context: str | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request for a response."""

    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    input: str | tuple[InputItem, ...] = asked("The conversation.", least=1, most=MOST_MESSAGES)
    instructions: str = asked("What the model is told before.", "")
    max_output_tokens: int | None = asked(
        "Most tokens of the answer, thoughts included.", None, least=1, most=2**31 - 1
    )
    temperature: float | None = asked("Higher is more varied.", None, least=0, most=5)
    top_p: float | None = asked("Share of the likeliest tokens.", None, least=0, most=1)
    stream: bool = asked("Send the answer as it is written.", default=False)
    stream_options: StreamOptions | None = asked("Without effect.", None)
    tools: tuple[ResponseTool, ...] = asked("What the model may call.", (), most=MOST_TOOLS)
    tool_choice: str | ToolPick | None = asked(
        '"none", "auto", "required", or a tool that must be called.', None
    )
    parallel_tool_calls: bool = asked("Whether several calls may come.", default=False)
    text: TextConfig | None = asked("What the text is like.", None)
    reasoning: ReasoningWish | None = asked("How much the model thinks.", None)
    previous_response_id: str | None = asked("Refused: nothing is kept.", None)
    conversation: str | JsonObject | None = asked("Refused: nothing is kept.", None)
    prompt: JsonObject | None = asked("Refused: there are no stored prompts.", None)
    background: bool | None = asked("Refused if true.", None)
    store: bool | None = asked("Without effect: nothing is stored.", None)
    metadata: JsonObject | None = asked("Given back as it is.", None)
    include: tuple[str, ...] = asked("Without effect.", ())
    truncation: str = asked("Without effect.", "")
    top_logprobs: int | None = asked("Without effect.", None)
    max_tool_calls: int | None = asked("Without effect.", None)
    user: str = asked("Without effect.", "")
    service_tier: str = asked("Without effect.", "")
    safety_identifier: str = asked("Without effect.", "")
    prompt_cache_key: str = asked("Without effect: prompts are always cached.", "")
    prompt_cache_retention: str = asked("Without effect.", "")
    client_metadata: JsonObject | None = asked("Without effect.", None)
