"""Requests in Ollama's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.server.openai.conversation import IGNORED, MAX_MESSAGES, MAX_TOOLS, OfferedTool
from app.server.openai.sampling import MAX_STOPS, SEEDS
from app.server.openai.texts import MAX_INPUTS
from app.server.request_fields import body_field, sampling_field
from engine import JsonObject


def model_of(name: str) -> str:
    """Return a model's name without Ollama's default tag."""
    return name.removesuffix(":latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """Options for an answer."""

    num_predict: int | None = body_field(
        "Maximum number of tokens in the answer; -1 for no limit.", None, least=-2
    )
    temperature: float | None = sampling_field("temperature")
    top_k: int | None = sampling_field("top_k")
    top_p: float | None = sampling_field("top_p")
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repeat_penalty")
    repeat_last_n: int | None = sampling_field("repeat_last_n")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    seed: int | None = body_field(
        "The same seed gives the same answer.", None, least=-1, most=SEEDS - 1
    )
    stop: str | tuple[str, ...] | None = body_field(
        "The answer stops before any of these texts.", None, most=MAX_STOPS
    )
    num_ctx: int | None = body_field("Ignored; set when the model is loaded.", None)
    num_keep: int | None = body_field(IGNORED, None)
    num_batch: int | None = body_field(IGNORED, None)
    num_gpu: int | None = body_field(IGNORED, None)
    num_thread: int | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaFunction:
    """A function call by the assistant."""

    name: str = body_field("Name of the function.")
    arguments: JsonObject | None = body_field("Arguments for the call.", None)
    index: int | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall:
    """A tool call in an earlier answer."""

    function: OllamaFunction = body_field("The function and its arguments.")
    id: str = body_field("Id of the call.", "")
    type: str = body_field(IGNORED, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaTurn:
    """A message in the conversation."""

    role: str = body_field('"system", "user", "assistant" or "tool".')
    content: str = body_field("The text.", "")
    thinking: str = body_field("Earlier reasoning by the assistant.", "")
    images: tuple[str, ...] = body_field(
        "Image files that precede the text, base64-encoded.", (), is_file=True
    )
    tool_calls: tuple[OllamaCall, ...] = body_field("Tool calls by the assistant.", ())
    tool_name: str = body_field("Name of the function that this result belongs to.", "")
    tool_call_id: str = body_field("Id of the call that this result belongs to.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOllamaRequest:
    """Fields that chat and text requests share."""

    model: str = body_field("Name of the model; empty for the loaded one.", "")
    stream: bool = body_field("Stream the answer.", default=True)
    format: str | JsonObject | None = body_field('"json", or a JSON schema for the answer.', None)
    options: OllamaOptions | None = body_field("Options for the answer.", None)
    think: bool | str | None = body_field(
        "Whether the model thinks, or the reasoning effort.", None
    )
    keep_alive: str | float | None = body_field("Ignored; set by the server.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatRequest(AnyOllamaRequest):
    """A request to answer a conversation."""

    messages: tuple[OllamaTurn, ...] = body_field("The conversation.", (), most=MAX_MESSAGES)
    tools: tuple[OfferedTool, ...] = body_field("Tools for the model.", (), most=MAX_TOOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateRequest(AnyOllamaRequest):
    """A request to answer or complete a text."""

    prompt: str = body_field("The prompt.", "")
    suffix: str = body_field("Text after the gap that the answer fills.", "")
    system: str = body_field("System prompt.", "")
    raw: bool = body_field("Complete the prompt without the chat template.", default=False)
    images: tuple[str, ...] = body_field(
        "Image files that precede the text, base64-encoded.", (), is_file=True
    )
    template: str = body_field("Must be empty.", "")
    context: tuple[int, ...] | None = body_field("Ignored; prompts are always cached.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShowRequest:
    """A request to describe a model."""

    model: str = body_field("Name of the model.", "")
    name: str = body_field("Alias for model.", "")
    verbose: bool | None = body_field(IGNORED, None)
    options: Mapping[str, float] | None = body_field(IGNORED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbedRequest:
    """A request for embeddings."""

    model: str = body_field("Name of the model; empty for the loaded one.", "")
    input: str | tuple[str, ...] = body_field("One or more texts.", least=1, most=MAX_INPUTS)
    truncate: bool | None = body_field("Ignored; texts that are too long are rejected.", None)
    dimensions: int | None = body_field("Ignored; vectors are not shortened.", None)
    options: JsonObject | None = body_field(IGNORED, None)
    keep_alive: str | float | None = body_field("Ignored; set by the server.", None)
