"""The route of chat completions."""

from __future__ import annotations

import json

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.chat_answer import ChatAnswer
from app.server.openai.chat_request import ChatRequest
from app.server.openai.errors import error_document
from app.server.openai.forms import form_of, form_place
from app.server.openai.messages import (
    chat_messages,
    offered_tools,
    parameter_places,
    tool_choice,
)
from app.server.openai.sampling import sampled
from app.server.refusal import FieldPlaces, bad_value
from app.server.web.responses import AwaitedJson, EventStream
from engine import Generate

EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that the engine has under another name."""


async def chat_completions(desk: Desk, record: RequestRecord, request: ChatRequest) -> Response:
    """Answer a conversation.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = desk.find(request.model, record)
    refuse_unsupported(request)
    template = chat_command(request)
    limit = request.max_completion_tokens
    most = request.max_tokens if limit is None else limit
    make = sampled(template, request, desk.settings.sampling, most)
    places = FieldPlaces(form_place(request), parameter_places(request.tools))
    events = desk.answers(record, request.n, make, places)
    spell = await desk.spelling.of(model.info.path) if request.logprobs else None
    answer = ChatAnswer(request, model.id, spell)
    if request.stream:
        return EventStream(answer.stream(events), error_document, desk.settings.ping_s)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse what would be answered otherwise than it is meant.

    Raises:
        Refusal: there is something of that kind.
    """
    if request.audio is not None or set(request.modalities) - {"text"}:
        raise bad_value("modalities", "Only text can be written, no sounds or pictures.")
    if request.functions or request.function_call is not None:
        raise bad_value("functions", "functions are not known any more; offer them as tools.")
    if request.web_search_options is not None:
        raise bad_value("web_search_options", "The model cannot search the web.")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise bad_value(
            "continue_final_message",
            "continue_final_message needs a message of the assistant at the end.",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "top_logprobs needs logprobs to be true.")


def chat_command(request: ChatRequest) -> Generate:
    """Return the command that answers a request, without its sampling.

    Raises:
        Refusal: something in it cannot be done.
    """
    variables = request.chat_template_kwargs or {}
    effort = request.reasoning_effort or ""
    thinks = variables.get("enable_thinking")
    if effort == "none":
        thinks, effort = False, ""
    return Generate(
        chat_messages(request.messages),
        timed_every=0,
        continue_last=request.continue_final_message,
        thinks=thinks if isinstance(thinks, bool) else None,
        effort=EFFORTS.get(effort, effort),
        variables=json.dumps(variables) if variables else "",
        tools=offered_tools(request.tools),
        tool_choice=tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        in_parts=True,
        grammar=form_of(request),
        n_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
