"""The operation of the Responses protocol."""

from __future__ import annotations

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.chat import EFFORTS
from app.server.openai.errors import error_document
from app.server.openai.forms import json_form
from app.server.openai.sampling import SamplingFields, sampled
from app.server.openai_responses.items import (
    chat_messages,
    offered_tools,
    parameter_places,
    tool_choice,
)
from app.server.openai_responses.response_answer import ResponseAnswer
from app.server.openai_responses.response_request import ResponseRequest
from app.server.refusal import FieldPlaces, bad_value
from app.server.web.operation import Operation
from app.server.web.responses import EVENTS, AwaitedJson, EventStream
from engine import Generate, Grammar


async def create_response(desk: Desk, record: RequestRecord, request: ResponseRequest) -> Response:
    """Answer a conversation.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = desk.find(request.model, record)
    refuse_unsupported(request)
    template = response_command(request)
    fields = SamplingFields(temperature=request.temperature, top_p=request.top_p)
    make = sampled(template, fields, desk.settings.sampling, request.max_output_tokens)
    places = FieldPlaces("text.format.schema", parameter_places(request.tools))
    events = desk.answers(record, 1, make, places)
    answer = ResponseAnswer(request, model.id)
    if request.stream:
        frames = answer.stream(events)
        return EventStream(frames, error_document, desk.settings.ping_s, answer.error_event)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_unsupported(request: ResponseRequest) -> None:
    """Refuse what would be answered otherwise than it is meant.

    Raises:
        Refusal: there is something of that kind.
    """
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise bad_value(name, f"{name} names nothing here: this server keeps no conversations.")
    if request.prompt is not None:
        raise bad_value("prompt", "This server stores no prompts.")
    if request.background:
        raise bad_value("background", "This server answers no request in the background.")


def response_command(request: ResponseRequest) -> Generate:
    """Return the command that answers a request, without its sampling.

    Raises:
        Refusal: something in it cannot be done.
    """
    effort = (request.reasoning and request.reasoning.effort) or ""
    thinks = False if effort == "none" else None
    return Generate(
        chat_messages(request),
        timed_every=0,
        thinks=thinks,
        effort="" if effort == "none" else EFFORTS.get(effort, effort),
        tools=offered_tools(request.tools),
        tool_choice=tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        in_parts=True,
        grammar=_form_of(request),
    )


def _form_of(request: ResponseRequest) -> Grammar | None:
    """Return the form that the answer must have; None for any."""
    asked = request.text and request.text.format
    if not asked or asked.type == "text":
        return None
    return json_form(asked.schema if asked.type == "json_schema" else None)


RESPONSES = (
    Operation(
        "/v1/responses", "Answer a conversation, as OpenAI's newer protocol has it.",
        create_response, ResponseRequest, streams=EVENTS, has_pictures=True,
    ),
)  # fmt: skip
"""All operations of the protocol."""
