"""The routes of Ollama's protocol that answer."""

from __future__ import annotations

import json
from dataclasses import replace

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.ollama.errors import error_document
from app.server.ollama.ollama_answer import OllamaAnswer, line_bytes, now
from app.server.ollama.ollama_request import (
    AnyOllamaRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaTurn,
    model_of,
)
from app.server.openai.forms import json_form
from app.server.openai.messages import offered_tools, parameter_places
from app.server.openai.sampling import SamplingFields, sampled
from app.server.refusal import FieldPlaces, bad_value
from app.server.web.responses import AwaitedJson, Document, EventStream, json_response
from engine import ChatMessage, Generate, Grammar, ToolCall

LINES = "application/x-ndjson"

ROLES = ("system", "user", "assistant", "tool")


async def chat(desk: Desk, record: RequestRecord, request: OllamaChatRequest) -> Response:
    """Go on with a conversation; without messages, have the model loaded.

    Raises:
        Refusal: the request cannot be answered.
    """
    messages = tuple(_message(turn, at) for at, turn in enumerate(request.messages))
    command = Generate(messages, tools=offered_tools(request.tools))
    return await _answer(desk, record, request, command if messages else None, is_chat=True)


async def generate(desk: Desk, record: RequestRecord, request: OllamaGenerateRequest) -> Response:
    """Answer a text, or go on with it; without one, have the model loaded.

    Raises:
        Refusal: the request cannot be answered.
    """
    if request.images and (request.raw or request.suffix):
        raise bad_value("images", "Images go with a chat template, not with raw or suffix.")
    if request.template:
        raise bad_value("template", "The chat template of a loaded model cannot be replaced.")
    if request.raw or request.suffix:
        command = Generate(prompt=request.prompt, suffix=request.suffix)
    else:
        told = [ChatMessage("system", request.system)] if request.system else []
        command = Generate((*told, ChatMessage("user", request.prompt, pictures=request.images)))
    is_asked = bool(request.prompt or request.suffix or request.images)
    return await _answer(desk, record, request, command if is_asked else None, is_chat=False)


def _message(turn: OllamaTurn, at: int) -> ChatMessage:
    if turn.role not in ROLES:
        place = f"messages[{at}].role"
        raise bad_value(place, f"{place} must be one of {', '.join(ROLES)}.")
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
    desk: Desk, record: RequestRecord, request: AnyOllamaRequest, command: Generate | None, *,
    is_chat: bool,
) -> Response:  # fmt: skip
    """Answer a command; without one, say that the model is loaded."""
    model = desk.find(model_of(request.model), record)
    if command is None:
        await desk.models.ready(model.id)
        return json_response(_nothing_asked(model.id, is_chat=is_chat))
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
    make = sampled(template, fields, desk.settings.sampling, most)
    tools = request.tools if isinstance(request, OllamaChatRequest) else ()
    places = FieldPlaces("format", parameter_places(tools))
    events = desk.answers(record, 1, make, places=places)
    answer = OllamaAnswer(model.id, is_chat=is_chat)
    if request.stream:
        return EventStream(
            answer.stream(events), error_document, None, line_bytes, media_type=LINES
        )
    return AwaitedJson(lambda: answer.collect(events), error_document)


def sampling_fields(options: OllamaOptions) -> SamplingFields:
    """Return the options of an answer as fields of the other protocol."""
    return SamplingFields(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        min_p=options.min_p, typical_p=options.typical_p, repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n, presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty, seed=options.seed, stop=options.stop,
    )  # fmt: skip


def _form_of(request: AnyOllamaRequest) -> Grammar | None:
    """Return the form that the answer must have; None for any.

    Raises:
        Refusal: it is neither "json" nor a schema.
    """
    asked = request.format
    if asked is None or asked == "":
        return None
    if isinstance(asked, dict):
        return json_form(asked)
    if asked != "json":
        raise bad_value("format", 'format must be "json" or a JSON schema.')
    return json_form(None)


def _nothing_asked(model: str, *, is_chat: bool) -> Document:
    text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": model, "created_at": now()}
    return {**head, **text, "done": True, "done_reason": "load"}
