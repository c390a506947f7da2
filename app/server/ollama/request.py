"""Requests of Ollama's protocol, as it documents them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.server.openai.conversation import MAX_MESSAGES, MAX_TOOLS, OfferedTool
from app.server.openai.sampling import MAX_STOPS, SEEDS
from app.server.openai.texts import MAX_INPUTS
from app.server.request_fields import body_field, sampling_field
from engine import JsonObject


def model_of(name: str) -> str:
    """Return the name of a model without the tag that Ollama gives models that have no other."""
    return name.removesuffix(":latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """Settings of an answer; those of the engine's memory are without effect."""

    num_predict: int | None = body_field(
        "Most tokens of the answer; -1 for no limit.", None, least=-2
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
        "The answer ends before any of these texts.", None, most=MAX_STOPS
    )
    num_ctx: int | None = body_field("Without effect: the context is set before loading.", None)
    num_keep: int | None = body_field("Without effect.", None)
    num_batch: int | None = body_field("Without effect.", None)
    num_gpu: int | None = body_field("Without effect.", None)
    num_thread: int | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaFunction:
    """A function that the assistant has called, with its arguments."""

    name: str = body_field("Name of the function.")
    arguments: JsonObject | None = body_field("Arguments of the call.", None)
    index: int | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall:
    """A call in an earlier answer."""

    function: OllamaFunction = body_field("The function and its arguments.")
    id: str = body_field("Name of the call.", "")
    type: str = body_field("Without effect.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaTurn:
    """A message of the conversation."""

    role: str = body_field('"system", "user", "assistant" or "tool".')
    content: str = body_field("The text.", "")
    thinking: str = body_field("What the assistant thought before its answer.", "")
    images: tuple[str, ...] = body_field(
        "Files of pictures as base64, which stand before the text.", (), is_file=True
    )
    tool_calls: tuple[OllamaCall, ...] = body_field("What the assistant called.", ())
    tool_name: str = body_field("Name of the function whose result this is.", "")
    tool_call_id: str = body_field("The call whose result this is.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOllamaRequest:
    """Fields that requests for chats and for texts share."""

    model: str = body_field("Name of the model; any that is loaded if it is empty.", "")
    stream: bool = body_field("Send the answer as it is written.", default=True)
    format: str | JsonObject | None = body_field('"json", or a JSON schema of the answer.', None)
    options: OllamaOptions | None = body_field("Settings of the answer.", None)
    think: bool | str | None = body_field("Whether the model thinks, or how much.", None)
    keep_alive: str | float | None = body_field("Without effect: the server says how long.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatRequest(AnyOllamaRequest):
    """A request that goes on with a conversation."""

    messages: tuple[OllamaTurn, ...] = body_field("The conversation.", (), most=MAX_MESSAGES)
    tools: tuple[OfferedTool, ...] = body_field("What the model may call.", (), most=MAX_TOOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateRequest(AnyOllamaRequest):
    """A request that answers a text, or goes on with it."""

    prompt: str = body_field("The text.", "")
    suffix: str = body_field("What follows behind the answer.", "")
    system: str = body_field("What the model is told before.", "")
    raw: bool = body_field("Go on with the text as it is.", default=False)
    images: tuple[str, ...] = body_field(
        "Files of pictures as base64, which stand before the text.", (), is_file=True
    )
    template: str = body_field("Refused, unless it is empty.", "")
    context: tuple[int, ...] | None = body_field("Without effect: prompts are cached anyway.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShowRequest:
    """A request for what is known of a model."""

    model: str = body_field("Name of the model.", "")
    name: str = body_field("The same as model.", "")
    verbose: bool | None = body_field("Without effect.", None)
    options: Mapping[str, float] | None = body_field("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbedRequest:
    """A request for embeddings."""

    model: str = body_field("Name of the model; any that is loaded if it is empty.", "")
    input: str | tuple[str, ...] = body_field("A text, or several.", least=1, most=MAX_INPUTS)
    truncate: bool | None = body_field("Without effect: texts that are too long are refused.", None)
    dimensions: int | None = body_field("Without effect: all numbers come.", None)
    options: JsonObject | None = body_field("Without effect.", None)
    keep_alive: str | float | None = body_field("Without effect: the server says how long.", None)
