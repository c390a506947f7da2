"""The client side of OpenAI's HTTP API: model lists, requests, and chunks as engine events.

See https://platform.openai.com/docs/api-reference/chat. Tandem's own fields are sent only to Tandem
servers, since others reject them. Model lists are untrusted input.
"""

from __future__ import annotations

import json
import math
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import engine  # for names that are imported on first use
from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection, error_text, not_understood
from engine import (
    IMAGE_PLACEHOLDER,
    AnswerPart,
    AnswerRequest,
    ChatMessage,
    EngineError,
    Event,
    Finished,
    FinishReason,
    ImageFile,
    SamplingParams,
    ThoughtMarker,
    Timings,
    TokenText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Usage,
    image_base64,
    one_line,
)

if TYPE_CHECKING:
    from engine import VisionInfo

UNKNOWN_TOKEN: Final = -1  # token id for remote text, since servers send no ids
MAX_TEXT: Final = 16 << 20  # maximum length of an answer, in characters
DONE: Final = "[DONE]"

REASONS: Final[Mapping[str, FinishReason]] = {"length": "length"}
"""Finish reasons by the server's name for them; all others count as "stop"."""

MIN_S: Final = 0.05
"""Decode time in seconds below which the speed is unknown, since the text came in one piece."""

MAX_COUNT: Final = 1 << 40


class AnswerReader:
    """Reader of a streamed answer.

    Args:
        command: the request; its `in_parts` determines how reasoning is emitted.
        host: name of the server, for errors.

    Attributes:
        is_complete: whether the server sent a finish reason.
        is_over: whether the stream has ended.
    """

    def __init__(self, command: AnswerRequest, host: str) -> None:
        self._in_parts, self._host = command.in_parts, host
        self._started_at = time.perf_counter()
        self._first_at = self._last_at = 0.0
        self._n_chunks = self._n_characters = 0
        self._marker = ThoughtMarker()
        self._usage: Usage | None = None
        self._reason: FinishReason = "stop"
        self._calls: dict[int, list[str]] = {}  # arguments so far
        self._n_ended = 0
        self.is_complete = self.is_over = False

    def read(self, data: str) -> Iterator[Event]:
        """Yield the events for one chunk.

        Raises:
            EngineError: the chunk is invalid or reports an error.
        """
        if data.strip() == DONE:
            self.is_complete = self.is_over = True
            return
        if not data.strip():
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise not_understood(self._host) from None
        if not isinstance(chunk, dict):
            raise not_understood(self._host)
        if chunk.get("error"):
            message = error_text(chunk)
            text = tr("{host} ended the answer with an error.").format(host=self._host)
            raise EngineError(f"{text} {message}".strip())
        self._note_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            yield from self._read_choice(choices[0])

    def finish(self) -> Iterator[Event]:
        """Yield the last events of a complete answer."""
        if closing := self._marker.closed():
            yield TokenText(closing, ())
        yield from self._end_call(is_cut=self._reason != "stop")
        yield self.finished(self._reason)

    def finished(self, reason: FinishReason) -> Finished:
        """Return the closing event of an answer that ends now."""
        return Finished(reason, self._counted(), self._timings())

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or choice.get("message") or choice
        if not isinstance(delta, dict):
            raise not_understood(self._host)
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            yield from self._read_text(reasoning, "reasoning")
        text = delta.get("content") or (delta.get("text") if delta is choice else None)
        if isinstance(text, str) and text:
            yield from self._read_text(text, "content")
        yield from self._read_calls(delta.get("tool_calls"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason, self.is_complete = REASONS.get(reason, "stop"), True

    def _read_text(self, text: str, part: AnswerPart) -> Iterator[Event]:
        self._count(len(text))
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be saved
        ids = (UNKNOWN_TOKEN,)
        if self._in_parts:
            yield TokenText(text, ids, part)
        else:
            yield TokenText(self._marker.written(text, is_thought=part == "reasoning"), ids)

    def _count(self, n_characters: int) -> None:
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._n_chunks += 1
        self._n_characters += n_characters
        if self._n_characters > MAX_TEXT:
            text = tr("The answer from {host} is too long, so it was stopped.")
            raise EngineError(text.format(host=self._host))

    def _read_calls(self, calls: object) -> Iterator[Event]:
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
                continue
            index, function = _count_of(call.get("index", place)), call["function"]
            if index not in self._calls:
                yield from self._end_call()
                self._calls[index] = []
                self._count(0)
                name = str(function.get("name") or "")
                yield ToolCallBegun(index, str(call.get("id") or f"call_{index}"), name)
            arguments = function.get("arguments")
            if isinstance(arguments, str) and arguments:
                self._count(len(arguments))
                self._calls[index].append(arguments)
                yield ToolCallText(index, arguments)

    def _end_call(self, *, is_cut: bool = False) -> Iterator[Event]:
        """Yield `ToolCallEnded` for the last call, once.

        Args:
            is_cut: whether the answer was cut off; some servers then close the arguments.
        """
        if self._n_ended < len(self._calls):
            self._n_ended = len(self._calls)
            index = [*self._calls][-1]
            is_object = _is_object("".join(self._calls[index]) or "{}")
            yield ToolCallEnded(index, is_object and not is_cut)

    def _note_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        read, written = (
            details if isinstance(details := usage.get(name), dict) else {}
            for name in ("prompt_tokens_details", "completion_tokens_details")
        )
        n_accepted = _count_of(written.get("accepted_prediction_tokens"))
        self._usage = Usage(
            _count_of(usage.get("prompt_tokens")),
            _count_of(read.get("cached_tokens")),
            _count_of(usage.get("completion_tokens")),
            n_accepted + _count_of(written.get("rejected_prediction_tokens")),
            n_accepted,
        )

    def _counted(self) -> Usage:
        """Return the token usage; if the server sent none, each chunk counts as one token."""
        return self._usage or Usage(completion_tokens=self._n_chunks)

    def _timings(self) -> Timings:
        if not self._first_at:
            return Timings()
        usage = self._counted()
        first_s, decode_s = self._first_at - self._started_at, self._last_at - self._first_at
        n_read = max(0, usage.prompt_tokens - usage.cached_tokens)
        n_later = max(0, usage.completion_tokens - 1)
        return Timings(
            prompt_s=first_s,
            decode_s=decode_s,
            first_token_s=first_s,
            prompt_per_s=n_read / first_s if first_s else 0.0,
            decode_per_s=n_later / decode_s if decode_s > MIN_S else 0.0,
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _count_of(value: object) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT
    return int(value) if is_count else 0  # type: ignore[call-overload]


MAX_LINES = 20_000


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """A server's current statistics.

    Attributes:
        tokens_per_s: combined speed of all answers.
        n_running, n_waiting: numbers of running and of waiting answers.
        kv_used, kv_room: tokens used in the KV cache, and its capacity; None if unknown.
    """

    tokens_per_s: float = 0.0
    n_running: int = 0
    n_waiting: int = 0
    kv_used: int | None = None
    kv_room: int | None = None


def read_figures(address: RemoteAddress, connection: Connection) -> ServerFigures:
    """Request a server's current statistics.

    Raises:
        EngineError: the request failed.
    """
    text = connection.read(f"{address.root}/metrics").decode("utf-8", "replace")
    return parse_figures(text)


def parse_figures(text: str) -> ServerFigures:
    """Parse Prometheus metrics; missing values become 0 or None."""
    values: dict[str, float] = {}
    for line in text.splitlines()[:MAX_LINES]:
        name, _, value = line.strip().rpartition(" ")
        if not name or name.startswith("#"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and 0 <= number < 1e15:
            values[name] = number
    used, room = values.get("tandem_kv_cache_used_tokens"), values.get("tandem_kv_cache_tokens")
    return ServerFigures(
        values.get("tandem_completion_tokens_per_second", 0.0),
        int(values.get("tandem_answers_running", 0)),
        int(values.get("tandem_answers_waiting", 0)),
        None if used is None else int(used),
        None if room is None else int(room),
    )


STANDARD = (
    "max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop",
)  # fmt: skip
"""Fields of `SamplingParams` that OpenAI's API has."""

FORMATS = ("json_schema", "grammar", "regex")
"""Fields of `SamplingParams` for structured output; see `_output_format`."""

TANDEM_FORMATS = {"gbnf": "grammar", "regex": "regex"}
"""Request fields that only Tandem has, by kind of grammar."""

KINDS = {
    b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif",
    b"BM": "image/bmp",
}  # fmt: skip
"""Image types by magic number; anything else is WebP."""

FORBIDS = -100.0  # logit bias that bans a token, as JSON has no infinity


def request_of(command: AnswerRequest, model: str, *, is_tandem: bool) -> dict[str, Any]:
    """Return the request body for a command.

    Raises:
        EngineError: the server does not support the command's grammar.
    """
    body: dict[str, Any] = {"model": model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if command.prompt is None:
        body |= conversation_document(command.messages, command.tools)
        if command.tools:
            body["tool_choice"] = _tool_choice(command.tool_choice)
            body["parallel_tool_calls"] = command.parallel_tool_calls
    else:
        body["prompt"] = command.prompt
    body |= _sampling(command.sampling, is_tandem=is_tandem)
    body |= _output_format(command, is_tandem=is_tandem)
    if is_tandem:
        body |= _tandem_fields(command)
    return body


def conversation_document(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
) -> dict[str, Any]:
    """Return the request fields for messages and tools."""
    fields_: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    if tools:
        fields_["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    return fields_


def _message(message: ChatMessage) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content
    if message.pictures:
        content = _parts(message)
    document: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        document["reasoning_content"] = message.reasoning
    if message.tool_calls:
        document["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        document["tool_call_id"] = message.tool_call_id
    return document


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    texts = message.content.split(IMAGE_PLACEHOLDER)
    n_first = max(0, len(message.pictures) - len(texts) + 1)
    images = [{"type": "image_url", "image_url": {"url": _data_uri(p)}} for p in message.pictures]
    parts: list[dict[str, Any]] = list(images[:n_first])
    for text, image in zip_longest(texts, images[n_first:]):
        if text:
            parts.append({"type": "text", "text": text})
        if image is not None:
            parts.append(image)
    return parts


def _data_uri(image: ImageFile | str) -> str:
    if isinstance(image, ImageFile):
        image = image_base64(image.path)
    head = b64decode(image[:24])
    kind = next((kind for mark, kind in KINDS.items() if head.startswith(mark)), "image/webp")
    return f"data:{kind};base64,{image}"


def _function(tool: Tool) -> dict[str, Any]:
    document: dict[str, Any] = {"name": tool.name}
    if tool.description:
        document["description"] = tool.description
    if tool.parameters:
        document["parameters"] = json.loads(tool.parameters)
    return document


def _tool_choice(choice: str) -> str | dict[str, Any]:
    if choice.startswith("="):
        return {"type": "function", "function": {"name": choice[1:]}}
    return choice


def _sampling(params: SamplingParams, *, is_tandem: bool) -> dict[str, Any]:
    values: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    others = [spec for spec in fields(SamplingParams) if spec.name not in (*values, *FORMATS)]
    for spec in others:
        value = getattr(params, spec.name)
        is_standard = spec.name in STANDARD and value != spec.default
        if is_standard or (is_tandem and spec.name not in STANDARD):
            values[spec.name] = value
    if is_tandem:
        values["logit_bias"] = {str(token): max(bias, FORBIDS) for token, bias in params.logit_bias}
    return values


def _output_format(command: AnswerRequest, *, is_tandem: bool) -> dict[str, Any]:
    grammar = command.grammar or command.sampling.form
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        schema: Mapping[str, Any] = {"name": "answer", "schema": json.loads(grammar.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if is_tandem and grammar.kind in TANDEM_FORMATS and not grammar.trigger:
        return {TANDEM_FORMATS[grammar.kind]: grammar.text}
    raise EngineError(
        tr("This server does not support this kind of grammar."),
        tr("Use a JSON schema, or a model on this machine."),
    )


def _tandem_fields(command: AnswerRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    variables = json.loads(command.variables) if command.variables else {}
    if command.thinks is not None:
        variables["enable_thinking"] = command.thinks
    if variables:
        values["chat_template_kwargs"] = variables
    if command.effort:
        values["reasoning_effort"] = command.effort
    if command.continue_last:
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    return values


MAX_MODELS = 5000
MAX_NAME = 300
MAX_CONTEXT = 1 << 32

TANDEM = "tandem"  # owner of models on a Tandem server
CONTEXT_NAMES = ("n_ctx", "max_model_len", "context_length", "context_window", "max_context_length")
"""Names for the context length: Tandem's and llama.cpp's, vLLM's, and those of other servers."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model on a server.

    Attributes:
        n_ctx: context length; 0 if unknown.
        vision: how many tokens images take; None if unknown.
    """

    name: str
    n_ctx: int = 0
    is_tandem: bool = False
    vision: VisionInfo | None = None


def list_models(address: RemoteAddress, connection: Connection) -> list[ListedModel]:
    """Return a server's models, in the server's order.

    Raises:
        EngineError: the request failed, or the response is not in OpenAI's format.
    """
    document = connection.json(f"{address.url}/models")
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise EngineError(
            tr("{host} does not list its models.").format(host=address.host),
            tr("Check that the server is OpenAI-compatible."),
        )
    return [model for entry in listed[:MAX_MODELS] if (model := _model(entry)) is not None]


def find_model(models: list[ListedModel], address: RemoteAddress) -> ListedModel:
    """Return the model that an address names, or the server's only model if it names none.

    Raises:
        EngineError: there is no such model, or the address must name one.
    """
    names = ", ".join(one_line(model.name, 60) for model in models[:10])
    has = tr("Available: {names}.").format(names=names) if names else ""
    if not address.model:
        if len(models) == 1:
            return models[0]
        text = tr("{host} has several models.") if models else tr("{host} has no models.")
        raise EngineError(text.format(host=address.host), has)
    for model in models:
        if model.name == address.model:
            return model
    text = tr("{host} has no model {name}.").format(
        host=address.host, name=one_line(address.model, 80)
    )
    raise EngineError(text, has)


def _model(entry: Any) -> ListedModel | None:
    if not isinstance(entry, dict):
        return None
    name, meta = entry.get("id"), entry.get("meta")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        return None
    facts = {**entry, **(meta if isinstance(meta, dict) else {})}
    sizes = (facts.get(key) for key in CONTEXT_NAMES)
    known = (n for n in sizes if type(n) is int and 0 < n < MAX_CONTEXT)
    is_tandem = entry.get("owned_by") == TANDEM
    vision = engine.VisionInfo.of_sizes(entry.get("pictures")) if is_tandem else None
    return ListedModel(name, next(known, 0), is_tandem, vision)
