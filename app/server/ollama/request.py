"""Requests of Ollama's protocol, as it documents them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.server.openai.conversation import MOST_MESSAGES, MOST_TOOLS, OfferedTool
from app.server.openai.sampling import MOST_STOPS, SEEDS
from app.server.openai.texts import MOST_INPUTS
from app.server.request_fields import JsonObject, asked, asked_like


def model_of(name: str) -> str:
    """Return the name of a model without the tag that Ollama gives models that have no other."""
    return name.removesuffix(":latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """Settings of an answer; those of the engine's memory are without effect."""

    num_predict: int | None = asked("Most tokens of the answer; -1 for no limit.", None, least=-2)
    temperature: float | None = asked_like("temperature")
    top_k: int | None = asked_like("top_k")
    top_p: float | None = asked_like("top_p")
    min_p: float | None = asked_like("min_p")
    typical_p: float | None = asked_like("typical_p")
    repeat_penalty: float | None = asked_like("repeat_penalty")
    repeat_last_n: int | None = asked_like("repeat_last_n")
    presence_penalty: float | None = asked_like("presence_penalty")
    frequency_penalty: float | None = asked_like("frequency_penalty")
    seed: int | None = asked("The same seed gives the same answer.", None, least=-1, most=SEEDS - 1)
    stop: str | tuple[str, ...] | None = asked(
        "The answer ends before any of these texts.", None, most=MOST_STOPS
    )
    num_ctx: int | None = asked("Without effect: the context is set before loading.", None)
    num_keep: int | None = asked("Without effect.", None)
    num_batch: int | None = asked("Without effect.", None)
    num_gpu: int | None = asked("Without effect.", None)
    num_thread: int | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaFunction:
    """A function that the assistant has called, with its arguments."""

    name: str = asked("Name of the function.")
    arguments: JsonObject | None = asked("Arguments of the call.", None)
    index: int | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall:
    """A call in an earlier answer."""

    function: OllamaFunction = asked("The function and its arguments.")
    id: str = asked("Name of the call.", "")
    type: str = asked("Without effect.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaTurn:
    """A message of the conversation."""

    role: str = asked('"system", "user", "assistant" or "tool".')
    content: str = asked("The text.", "")
    thinking: str = asked("What the assistant thought before its answer.", "")
    images: tuple[str, ...] = asked(
        "Files of pictures as base64, which stand before the text.", (), is_file=True
    )
    tool_calls: tuple[OllamaCall, ...] = asked("What the assistant called.", ())
    tool_name: str = asked("Name of the function whose result this is.", "")
    tool_call_id: str = asked("The call whose result this is.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOllamaRequest:
    """Fields that requests for chats and for texts share."""

    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    stream: bool = asked("Send the answer as it is written.", default=True)
    format: str | JsonObject | None = asked('"json", or a JSON schema of the answer.', None)
    options: OllamaOptions | None = asked("Settings of the answer.", None)
    think: bool | str | None = asked("Whether the model thinks, or how much.", None)
    keep_alive: str | float | None = asked("Without effect: the server says how long.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatRequest(AnyOllamaRequest):
    """A request that goes on with a conversation."""

    messages: tuple[OllamaTurn, ...] = asked("The conversation.", (), most=MOST_MESSAGES)
    tools: tuple[OfferedTool, ...] = asked("What the model may call.", (), most=MOST_TOOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateRequest(AnyOllamaRequest):
    """A request that answers a text, or goes on with it."""

    prompt: str = asked("The text.", "")
    suffix: str = asked("What follows behind the answer.", "")
    system: str = asked("What the model is told before.", "")
    raw: bool = asked("Go on with the text as it is.", default=False)
    images: tuple[str, ...] = asked(
        "Files of pictures as base64, which stand before the text.", (), is_file=True
    )
    template: str = asked("Refused, unless it is empty.", "")
    context: tuple[int, ...] | None = asked("Without effect: prompts are cached anyway.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShowRequest:
    """A request for what is known of a model."""

    model: str = asked("Name of the model.", "")
    name: str = asked("The same as model.", "")
    verbose: bool | None = asked("Without effect.", None)
    options: Mapping[str, float] | None = asked("Without effect.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbedRequest:
    """A request for embeddings."""

    model: str = asked("Name of the model; any that is loaded if it is empty.", "")
    input: str | tuple[str, ...] = asked("A text, or several.", least=1, most=MOST_INPUTS)
    truncate: bool | None = asked("Without effect: texts that are too long are refused.", None)
    dimensions: int | None = asked("Without effect: all numbers come.", None)
    options: JsonObject | None = asked("Without effect.", None)
    keep_alive: str | float | None = asked("Without effect: the server says how long.", None)
