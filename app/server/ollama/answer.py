"""The routes of Ollama's protocol."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.server.context import AnswerEvents, ServerContext
from app.server.models import OfferedModel, capabilities_of
from app.server.ollama.request import (
    AnyOllamaRequest,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
    OllamaTurn,
    model_of,
)
from app.server.openai.answer import read_arguments
from app.server.openai.conversation import json_form, offered_tools, parameter_places
from app.server.openai.sampling import SamplingFields, sampled
from app.server.openai.texts import embedded, embedding_inputs
from app.server.refusal import FieldPlaces, Refusal, bad_value, placed_text
from app.server.request_log import RequestRecord
from app.server.web.operations import Operation
from app.server.web.responses import AwaitedJson, Document, EventStream, json_bytes, json_response
from engine import AnswerBlock, AnswerBlocks, AnswerRequest, ChatMessage, Embed, Grammar, ToolCall

REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "length"}
"""Ollama's finish reasons by the engine's."""

NS = 1e9  # nanoseconds per second


def now() -> str:
    """Return the current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line_bytes(document: Document) -> bytes:
    """Return a document as a line of a stream."""
    return json_bytes(document) + b"\n"


def call_documents(calls: Iterable[AnswerBlock]) -> list[Document]:
    """Return documents for the complete calls that have valid arguments."""
    read = [(one.name, read_arguments(one.text)) for one in calls if one.is_whole]
    return [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in read
        if arguments is not None
    ]


class OllamaAnswer:
    """The response to a request, built from its answer's events.

    Args:
        is_chat: whether the answer is a message rather than a plain text.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._blocks = AnswerBlocks()
        self._start = time.perf_counter()

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the complete response."""
        async with aclosing(events):
            async for _, event in events:
                self._blocks.add(event)
        blocks = self._blocks
        calls = call_documents(blocks.calls)
        whole = self._document(blocks.text_of("text"), blocks.text_of("thought"), calls)
        return whole | self._last()

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as lines of JSON."""
        async with aclosing(events):
            async for _, event in events:
                for change, block, text in self._blocks.add(event):
                    if block.kind != "call" and change == "grown":
                        texts = ("", text) if block.kind == "thought" else (text, "")
                        yield line_bytes(self._document(*texts, []))
                    is_over = block.kind == "call" and change == "ended"
                    if is_over and (calls := call_documents([block])):
                        yield line_bytes(self._document("", "", calls))
        yield line_bytes(self._document("", "", []) | self._last())

    def _document(self, text: str, thought: str, calls: list[Document]) -> Document:
        more: Document = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = calls
        head: Document = {"model": self._model, "created_at": now(), "done": False}
        if self._is_chat:
            return head | {"message": {"role": "assistant", "content": text, **more}}
        return head | {"response": text, **more}

    def _last(self) -> Document:
        finished = self._blocks.finished
        assert finished is not None, "the answer has ended"
        usage, timings = finished.usage, finished.timings
        return {
            "done": True,
            "done_reason": REASONS[finished.reason],
            "total_duration": int((time.perf_counter() - self._start) * NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timings.prompt_s * NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timings.decode_s * NS),
        }


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return the error document for a refusal, including its hint and field."""
    return {"error": placed_text(refusal)}


LINES = "application/x-ndjson"

ROLES = ("system", "user", "assistant", "tool")


async def chat(
    context: ServerContext, record: RequestRecord, request: OllamaChatRequest
) -> Response:
    """Answer a conversation, or load the model if there are no messages."""
    messages = tuple(_message(turn, at) for at, turn in enumerate(request.messages))
    command = AnswerRequest(messages, tools=offered_tools(request.tools))
    return await _answer(context, record, request, command if messages else None, is_chat=True)


async def generate(
    context: ServerContext, record: RequestRecord, request: OllamaGenerateRequest
) -> Response:
    """Answer or complete a text, or load the model if there is none."""
    if request.images and (request.raw or request.suffix):
        raise bad_value("images", "images cannot be combined with raw or suffix.")
    if request.template:
        raise bad_value("template", "A loaded model's chat template cannot be replaced.")
    if request.raw or request.suffix:
        command = AnswerRequest(prompt=request.prompt, suffix=request.suffix)
    else:
        system = [ChatMessage("system", request.system)] if request.system else []
        command = AnswerRequest(
            (*system, ChatMessage("user", request.prompt, pictures=request.images))
        )
    has_text = bool(request.prompt or request.suffix or request.images)
    return await _answer(context, record, request, command if has_text else None, is_chat=False)


def _message(turn: OllamaTurn, at: int) -> ChatMessage:
    if turn.role not in ROLES:
        place = f"messages[{at}].role"
        text = "{place} must be one of {roles}."
        raise bad_value(place, text, place=place, roles=", ".join(ROLES))
    calls = tuple(
        ToolCall(
            one.function.name, json.dumps(one.function.arguments or {}, ensure_ascii=False), one.id
        )
        for one in turn.tool_calls
    )
    return ChatMessage(
        turn.role, turn.content, turn.thinking, calls, turn.tool_call_id, turn.tool_name,
        pictures=turn.images,
    )  # fmt: skip


async def _answer(
    context: ServerContext, record: RequestRecord, request: AnyOllamaRequest,
    command: AnswerRequest | None, *, is_chat: bool,
) -> Response:  # fmt: skip
    model = context.find(model_of(request.model), record)
    if command is None:
        await context.models.ready(model.id)
        return json_response(_load_document(model.id, is_chat=is_chat))
    effort = request.think if isinstance(request.think, str) else ""
    template = replace(
        command,
        timed_every=0,
        in_parts=True,
        thinks=request.think if isinstance(request.think, bool) else None,
        effort=effort,
        grammar=_form_of(request),
    )
    options = request.options or OllamaOptions()
    fields = sampling_fields(options)
    most = None if options.num_predict is None else max(-1, options.num_predict)
    make = sampled(template, fields, context.settings.sampling, most)
    tools = request.tools if isinstance(request, OllamaChatRequest) else ()
    places = FieldPlaces("format", parameter_places(tools))
    events = context.answers(record, 1, make, places=places)
    answer = OllamaAnswer(model.id, is_chat=is_chat)
    if request.stream:
        return EventStream(
            answer.stream(events), error_document, None, line_bytes, media_type=LINES
        )
    return AwaitedJson(lambda: answer.collect(events), error_document)


def sampling_fields(options: OllamaOptions) -> SamplingFields:
    """Convert Ollama's options to OpenAI's fields."""
    return SamplingFields(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        min_p=options.min_p, typical_p=options.typical_p, repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n, presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty, seed=options.seed, stop=options.stop,
    )  # fmt: skip


def _form_of(request: AnyOllamaRequest) -> Grammar | None:
    form = request.format
    if form is None or form == "":
        return None
    if isinstance(form, dict):
        return json_form(form)
    if form != "json":
        raise bad_value("format", 'format must be "json" or a JSON schema.')
    return json_form(None)


def _load_document(model: str, *, is_chat: bool) -> Document:
    text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": model, "created_at": now()}
    return {**head, **text, "done": True, "done_reason": "load"}


VERSION = "0.14.0"  # Ollama version with this protocol; some clients reject older versions
FOREVER = "2318-01-01T00:00:00Z"  # expiry for a model that is never unloaded, in Ollama's format


async def tell_version(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    """Return the protocol's version."""
    return json_response({"version": VERSION})


async def list_tags(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    """List the models."""
    return json_response({"models": [_described(one) for one in context.models.offered()]})


async def list_running(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    """List the loaded models."""
    loaded = [one for one in context.models.offered() if one.n_ctx is not None]
    memory = context.engine.model.memory if context.engine.model is not None else ()
    on_gpus = sum(one.measured.total for one in memory if not one.device.startswith("cpu"))
    more = {"expires_at": FOREVER, "size_vram": on_gpus}
    models = [_described(one) | more | {"context_length": one.n_ctx} for one in loaded]
    return json_response({"models": models})


async def show(
    context: ServerContext, record: RequestRecord, request: OllamaShowRequest
) -> Response:
    """Describe a model."""
    one = context.find(model_of(request.model or request.name), record)
    info = one.info
    facts = {
        "general.architecture": info.architecture, "general.basename": info.name,
        "general.parameter_count": info.n_params,
        f"{info.architecture}.context_length": info.n_ctx_train,
        f"{info.architecture}.embedding_length": info.n_embd,
        f"{info.architecture}.block_count": info.n_layer,
    }  # fmt: skip
    return json_response(
        {
            "modelfile": "", "parameters": "", "template": "", "details": _details(one),
            "model_info": facts, "capabilities": capabilities_of(info, sees=one.vision is not None),
            "modified_at": _written_at(one),
        }
    )  # fmt: skip


def _described(one: OfferedModel) -> Document:
    return {
        "name": one.id, "model": one.id, "modified_at": _written_at(one),
        "size": one.info.n_bytes, "digest": "", "details": _details(one),
    }  # fmt: skip


def _written_at(one: OfferedModel) -> str:
    return datetime.fromtimestamp(one.created, UTC).isoformat().replace("+00:00", "Z")


def _details(one: OfferedModel) -> Document:
    info = one.info
    return {
        "parent_model": "", "format": "gguf", "family": info.architecture,
        "families": [info.architecture], "parameter_size": f"{info.n_params / 1e9:.1f}B",
        "quantization_level": info.quant,
    }  # fmt: skip


async def embed(
    context: ServerContext, record: RequestRecord, request: OllamaEmbedRequest
) -> Response:
    """Return embeddings for texts."""
    start = time.perf_counter()
    info = context.find(model_of(request.model), record).info
    command = Embed(embedding_inputs(request.input, info.n_vocab))

    async def make() -> Document:
        done = await embedded(context, record, command)
        return {
            "model": record.model, "embeddings": [[*vector] for vector in done.vectors],
            "total_duration": int((time.perf_counter() - start) * NS), "load_duration": 0,
            "prompt_eval_count": done.n_tokens,
        }  # fmt: skip

    return AwaitedJson(make, error_document)


_operation = partial(Operation, shape=error_document)

OLLAMA = (
    _operation(
        "/api/chat", "Answer a conversation (Ollama).", chat, OllamaChatRequest,
        streams=LINES, has_pictures=True,
    ),
    _operation(
        "/api/generate", "Answer or complete a text (Ollama).", generate, OllamaGenerateRequest,
        streams=LINES, has_pictures=True,
    ),
    _operation(
        "/api/embed", "Compute embeddings for texts (Ollama).", embed, OllamaEmbedRequest
    ),
    _operation("/api/tags", "List the models (Ollama).", list_tags),
    _operation("/api/ps", "List the loaded models (Ollama).", list_running),
    _operation("/api/show", "Describe a model (Ollama).", show, OllamaShowRequest),
    _operation("/api/version", "Return the version of Ollama's protocol.", tell_version),
)  # fmt: skip
