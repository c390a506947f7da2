"""Requests of the Messages protocol, as Anthropic documents them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.server.openai.chat_request import MOST_MESSAGES, MOST_TOOLS
from app.server.openai.sampling import MOST_STOPS
from app.server.requests.reading import JsonObject, asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultBlock:
    """A part of the result of a tool; only texts can be read."""

    type: str = asked('"text"; pictures are refused.')
    text: str = asked("The text.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """A picture."""

    type: str = asked('"base64"; addresses are not fetched.')
    media_type: str = asked("Without effect: the file itself says what it is.", "")
    data: str = asked("The picture's file as base64.", "", is_file=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBlock:
    """A part of a message: a text, a picture, a thought, a call of a tool, or its result."""

    type: str = asked('"text", "image", "thinking", "tool_use" or "tool_result".')
    source: PictureSource | None = asked("The picture.", None)
    text: str = asked("The text.", "")
    thinking: str = asked("What the assistant has thought.", "")
    signature: str = asked("Without effect.", "")
    data: str = asked("Without effect: a thought that nobody can read.", "")
    id: str = asked("Name of the call.", "")
    name: str = asked("Name of the tool that is called.", "")
    input: JsonObject | None = asked("Arguments of the call.", None)
    tool_use_id: str = asked("Name of the call whose result this is.", "")
    content: str | tuple[ResultBlock, ...] | None = asked("The result of a call.", None)
    is_error: bool | None = asked("Whether the call has failed, which the model is told.", None)
    cache_control: JsonObject | None = asked("Without effect: prompts are always cached.", None)
    citations: tuple[JsonObject, ...] | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTurn:
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = asked("Who speaks.")
    content: str | tuple[MessageBlock, ...] = asked("A text, or its parts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool that the model may call."""

    name: str = asked("Name of the tool.")
    type: str = asked('"custom"; tools that run on the server are refused.', "custom")
    description: str = asked("What it does, for the model.", "")
    input_schema: JsonObject | None = asked("JSON schema of its arguments.", None)
    strict: bool | None = asked("Without effect: a schema always holds.", None)
    cache_control: JsonObject | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWish:
    """The choice of the tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"] = asked("None, any, at least one, or this one.")
    name: str = asked("Name of the tool that must be called.", "")
    disable_parallel_tool_use: bool = asked("Whether one call ends the answer.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingWish:
    """The wish that the model thinks before it answers, or does not."""

    type: Literal["enabled", "disabled", "adaptive"] = asked("Adaptive is the same as enabled.")
    budget_tokens: int | None = asked("Without effect.", None)
    display: str = asked("Without effect.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The form that an answer must have."""

    type: Literal["json_schema"] = asked("JSON.")
    schema: JsonObject = asked("JSON schema of the answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The form of an answer, and how much the model thinks."""

    format: OutputFormat | None = asked("The form of the answer.", None)
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = asked(
        "How much the model thinks, if it can.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation with its tools, whose tokens can be counted."""

    model: str = asked("Name of the model; any that is loaded if it is empty.")
    messages: tuple[MessageTurn, ...] = asked("The conversation.", least=1, most=MOST_MESSAGES)
    system: str | tuple[MessageBlock, ...] = asked("What the model is told before.", "")
    tools: tuple[ToolOffer, ...] = asked("What the model may call.", (), most=MOST_TOOLS)
    tool_choice: ToolWish | None = asked("Which tools it may or must call.", None)
    thinking: ThinkingWish | None = asked("Whether it thinks; if not said, as it likes.", None)
    output_config: OutputConfig | None = asked("The form of the answer.", None)
    output_format: OutputFormat | None = asked("The same as output_config.format.", None)
    cache_control: JsonObject | None = asked("Without effect.", None)
    context_management: JsonObject | None = asked("Without effect.", None)
    mcp_servers: tuple[JsonObject, ...] = asked("Refused, unless it is empty.", ())
    container: str | JsonObject | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(AskedConversation):
    """A request for an answer."""

    max_tokens: int = asked("Most tokens of the answer.", least=1, most=2**31 - 1)
    stop_sequences: tuple[str, ...] = asked(
        "The answer ends before any of these texts.", (), most=MOST_STOPS
    )
    stream: bool = asked("Send the answer as it is written.", default=False)
    temperature: float | None = asked("Higher is more varied.", None, least=0, most=5)
    top_p: float | None = asked("Share of the likeliest tokens.", None, least=0, most=1)
    top_k: int | None = asked("Number of likeliest tokens.", None, least=0, most=2**31 - 1)
    metadata: JsonObject | None = asked("Without effect.", None)
    service_tier: str = asked("Without effect.", "")
    speed: str = asked("Without effect.", "")
    inference_geo: str | None = asked("Without effect.", None)
