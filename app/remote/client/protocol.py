"""OpenAI's HTTP API as a client: model lists, requests, and streamed chunks as engine events.

Requests follow https://platform.openai.com/docs/api-reference/chat; our own fields go to a Tandem
alone, as others refuse them. Nothing that a server says of its models is relied on.
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

import engine  # for names that are resolved when they are used
from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection, error_text
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

UNKNOWN_TOKEN: Final = -1
"""Id of each token of a remote answer, as servers do not tell any."""

MAX_TEXT: Final = 16 << 20
"""Largest number of characters of an answer."""

DONE: Final = "[DONE]"

REASONS: Final[Mapping[str, FinishReason]] = {"length": "length"}
"""Our name of the reasons for which an answer ends; all others are an end of the model's own."""

MIN_S: Final = 0.05
"""Seconds of text below which its speed is unknown: it has come at once."""

MAX_COUNT: Final = 1 << 40


class AnswerReader:
    """Reader of a streamed answer, with what has come of it so far.

    Args:
        command: the request; `in_parts` says how a thought is told.
        host: name of the server, for sentences.

    Attributes:
        is_complete: whether the server has said that the answer ends.
        is_over: whether nothing follows any more.
    """

    def __init__(self, command: AnswerRequest, host: str) -> None:
        self._in_parts, self._host = command.in_parts, host
        self._asked_at = time.perf_counter()
        self._first_at = self._last_at = 0.0
        self._n_chunks = self._n_characters = 0
        self._marker = ThoughtMarker()
        self._usage: Usage | None = None
        self._reason: FinishReason = "stop"
        self._calls: dict[int, list[str]] = {}  # arguments of the calls that have begun
        self._n_ended = 0
        self.is_complete = self.is_over = False

    def read(self, data: str) -> Iterator[Event]:
        """Yield the events of one chunk.

        Raises:
            EngineError: it is an error of the server, or not understood.
        """
        if data.strip() == DONE:
            self.is_complete = self.is_over = True
            return
        if not data.strip():
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise self._not_understood() from None
        if not isinstance(chunk, dict):
            raise self._not_understood()
        if chunk.get("error"):
            said = error_text(chunk)
            text = tr("{host} has ended the answer with an error.").format(host=self._host)
            raise EngineError(f"{text} {said}".strip())
        self._note_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            yield from self._read_choice(choices[0])

    def finish(self) -> Iterator[Event]:
        """Yield the last events of an answer that the server has ended."""
        if closing := self._marker.closed():
            yield TokenText(closing, ())
        yield from self._end_call(is_cut=self._reason != "stop")
        yield self.finished(self._reason)

    def finished(self, reason: FinishReason) -> Finished:
        """Return the closing event of an answer that ends here for a reason."""
        return Finished(reason, self._counted(), self._timings())

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or choice.get("message") or choice
        if not isinstance(delta, dict):
            raise self._not_understood()
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield from self._tell(thought, "reasoning")
        text = delta.get("content") or (delta.get("text") if delta is choice else None)
        if isinstance(text, str) and text:
            yield from self._tell(text, "content")
        yield from self._read_calls(delta.get("tool_calls"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason, self.is_complete = REASONS.get(reason, "stop"), True

    def _tell(self, text: str, part: AnswerPart) -> Iterator[Event]:
        """Yield a text; where the answer does not come in parts, thoughts have marks around."""
        self._count(len(text))
        text = text.encode("utf-8", "replace").decode("utf-8")  # halves of pairs cannot be saved
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
            text = tr("The answer of {host} does not end, so it was stopped.")
            raise EngineError(text.format(host=self._host))

    def _read_calls(self, calls: object) -> Iterator[Event]:
        """Yield the events of calls of functions, which come in pieces."""
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
        """Yield `ToolCallEnded` for the last call, unless it was yielded before.

        Args:
            is_cut: whether the answer was cut off: some servers close the arguments then.
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
        n_right = _count_of(written.get("accepted_prediction_tokens"))
        self._usage = Usage(
            _count_of(usage.get("prompt_tokens")),
            _count_of(read.get("cached_tokens")),
            _count_of(usage.get("completion_tokens")),
            n_right + _count_of(written.get("rejected_prediction_tokens")),
            n_right,
        )

    def _counted(self) -> Usage:
        """Return the numbers of tokens; one for each chunk where the server does not tell them."""
        return self._usage or Usage(completion_tokens=self._n_chunks)

    def _timings(self) -> Timings:
        """Return the times as they were seen here, with those of network and queue."""
        if not self._first_at:
            return Timings()
        usage = self._counted()
        first_s, decode_s = self._first_at - self._asked_at, self._last_at - self._first_at
        n_read = max(0, usage.prompt_tokens - usage.cached_tokens)
        n_later = max(0, usage.completion_tokens - 1)
        return Timings(
            prompt_s=first_s,
            decode_s=decode_s,
            first_token_s=first_s,
            prompt_per_s=n_read / first_s if first_s else 0.0,
            decode_per_s=n_later / decode_s if decode_s > MIN_S else 0.0,
        )

    def _not_understood(self) -> EngineError:
        text = tr("The answer of {host} is not understood.").format(host=self._host)
        return EngineError(text, tr("Check that the address is one of OpenAI's interface."))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _count_of(value: object) -> int:
    """Return a number of tokens as a server tells it; 0 for what is none."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT
    return int(value) if is_count else 0  # type: ignore[call-overload]


MAX_LINES = 20_000


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of a server at one moment.

    Attributes:
        tokens_per_s: speed of all answers together.
        n_running, n_waiting: answers that are computed, and that wait for that.
        kv_used, kv_room: tokens in the KV cache, and those for which it has room; None where the
            server does not tell.
    """

    tokens_per_s: float = 0.0
    n_running: int = 0
    n_waiting: int = 0
    kv_used: int | None = None
    kv_room: int | None = None


def read_figures(address: RemoteAddress, connection: Connection) -> ServerFigures:
    """Return the present figures of a server.

    Raises:
        EngineError: it cannot be asked.
    """
    text = connection.read(f"{address.root}/metrics").decode("utf-8", "replace")
    return parse_figures(text)


def parse_figures(text: str) -> ServerFigures:
    """Return the figures in a text; those that it lacks are 0 or None."""
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
"""Fields of `SamplingParams` that OpenAI's interface has, by the same names."""

FORMS = ("json_schema", "grammar", "regex")
"""Fields of `SamplingParams` that ask for a form of the answer, see `_form`."""

OWN_FORMS = {"gbnf": "grammar", "regex": "regex"}
"""Fields of forms that only a Tandem has, by the kind of the grammar."""

KINDS = {
    b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif",
    b"BM": "image/bmp",
}  # fmt: skip
"""Types of pictures by the first bytes of their files; the rest is WebP."""

FORBIDS = -100.0
"""Bias with which a token never comes, as JSON has no infinite numbers."""


def request_of(command: AnswerRequest, model: str, *, is_tandem: bool) -> dict[str, Any]:
    """Return the body of a request that a command asks for.

    Raises:
        EngineError: the server cannot do what is asked for.
    """
    body: dict[str, Any] = {"model": model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if command.prompt is None:
        body |= conversation_document(command.messages, command.tools)
        if command.tools:
            body["tool_choice"] = _choice(command.tool_choice)
            body["parallel_tool_calls"] = command.parallel_tool_calls
    else:
        body["prompt"] = command.prompt
    body |= _sampling(command.sampling, is_tandem=is_tandem)
    body |= _form(command, is_tandem=is_tandem)
    if is_tandem:
        body |= _own(command)
    return body


def conversation_document(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
) -> dict[str, Any]:
    """Return the fields of a conversation and of the functions that the model may call."""
    found: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    if tools:
        found["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    return found


def _message(message: ChatMessage) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content
    if message.pictures:
        content = _parts(message)
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    """Return the text and the pictures of a message, each where it stands.

    Raises:
        EngineError: the file of a picture cannot be read.
    """
    texts = message.content.split(IMAGE_PLACEHOLDER)
    n_first = max(0, len(message.pictures) - len(texts) + 1)
    shown = [{"type": "image_url", "image_url": {"url": _data_uri(p)}} for p in message.pictures]
    parts: list[dict[str, Any]] = list(shown[:n_first])
    for text, behind in zip_longest(texts, shown[n_first:]):
        if text:
            parts.append({"type": "text", "text": text})
        if behind is not None:
            parts.append(behind)
    return parts


def _data_uri(picture: ImageFile | str) -> str:
    """Return a picture as an address that holds all of it (RFC 2397)."""
    if isinstance(picture, ImageFile):
        picture = image_base64(picture.path)
    head = b64decode(picture[:24])
    kind = next((kind for mark, kind in KINDS.items() if head.startswith(mark)), "image/webp")
    return f"data:{kind};base64,{picture}"


def _function(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tool.name}
    if tool.description:
        found["description"] = tool.description
    if tool.parameters:
        found["parameters"] = json.loads(tool.parameters)
    return found


def _choice(choice: str) -> str | dict[str, Any]:
    if choice.startswith("="):
        return {"type": "function", "function": {"name": choice[1:]}}
    return choice


def _sampling(params: SamplingParams, *, is_tandem: bool) -> dict[str, Any]:
    """Return the fields of sampling: those that everybody knows, and all for a Tandem."""
    found: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    others = [spec for spec in fields(SamplingParams) if spec.name not in (*found, *FORMS)]
    for spec in others:
        value = getattr(params, spec.name)
        is_standard = spec.name in STANDARD and value != spec.default
        if is_standard or (is_tandem and spec.name not in STANDARD):
            found[spec.name] = value
    if is_tandem:
        found["logit_bias"] = {str(token): max(bias, FORBIDS) for token, bias in params.logit_bias}
    return found


def _form(command: AnswerRequest, *, is_tandem: bool) -> dict[str, Any]:
    """Return the field of the form that an answer must have.

    Raises:
        EngineError: the server has no field for it.
    """
    grammar = command.grammar or command.sampling.form
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        schema: Mapping[str, Any] = {"name": "answer", "schema": json.loads(grammar.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if is_tandem and grammar.kind in OWN_FORMS and not grammar.trigger:
        return {OWN_FORMS[grammar.kind]: grammar.text}
    raise EngineError(
        tr("This server cannot hold answers to such a grammar."),
        tr("Use a JSON schema, or a model on this machine."),
    )


def _own(command: AnswerRequest) -> dict[str, Any]:
    """Return the fields that only a Tandem has."""
    found: dict[str, Any] = {}
    variables = json.loads(command.variables) if command.variables else {}
    if command.thinks is not None:
        variables["enable_thinking"] = command.thinks
    if variables:
        found["chat_template_kwargs"] = variables
    if command.effort:
        found["reasoning_effort"] = command.effort
    if command.continue_last:
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    return found


MAX_MODELS = 5000
MAX_NAME = 300
MAX_CONTEXT = 1 << 32

TANDEM = "tandem"
"""Owner of models that a Tandem serves."""

CONTEXT_NAMES = ("n_ctx", "max_model_len", "context_length", "context_window", "max_context_length")
"""Names of a model's context: Tandem's and llama.cpp's, vLLM's, and those of others."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a server.

    Attributes:
        name: its name in requests.
        n_ctx: its context in tokens; 0 where the server does not tell it.
        is_tandem: whether a Tandem serves it.
        vision: how many tokens it makes of a picture; None where the server does not tell it.
    """

    name: str
    n_ctx: int = 0
    is_tandem: bool = False
    vision: VisionInfo | None = None


def list_models(address: RemoteAddress, connection: Connection) -> list[ListedModel]:
    """Return the models of a server, in its order.

    Raises:
        EngineError: it cannot be asked, or does not answer as OpenAI's interface does.
    """
    document = connection.json(f"{address.url}/models")
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise EngineError(
            tr("{host} does not list its models.").format(host=address.host),
            tr("Check that the address is one of OpenAI's interface."),
        )
    return [found for entry in listed[:MAX_MODELS] if (found := _model(entry)) is not None]


def find_model(models: list[ListedModel], address: RemoteAddress) -> ListedModel:
    """Return the model that an address names; the only one of its server if it names none.

    Raises:
        EngineError: there is no such model, or a name is wanted.
    """
    names = ", ".join(one_line(model.name, 60) for model in models[:10])
    has = tr("It has: {names}.").format(names=names) if names else ""
    if not address.model:
        if len(models) == 1:
            return models[0]
        text = tr("{host} has several models.") if models else tr("{host} has no model.")
        raise EngineError(text.format(host=address.host), has)
    for model in models:
        if model.name == address.model:
            return model
    text = tr("{host} has no model {name}.").format(
        host=address.host, name=one_line(address.model, 80)
    )
    raise EngineError(text, has)


def _model(entry: Any) -> ListedModel | None:
    """Return the model of an entry; None for one that has no usable name."""
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
