"""Responses built from engine events, complete or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Literal

from starlette.responses import Response

from app.server.context import AnswerEvents, ServerContext
from app.server.openai.answer import TokenCount, misfit, read_arguments
from app.server.openai.conversation import json_form
from app.server.openai.routes import EFFORTS
from app.server.openai.sampling import SamplingFields, sampled
from app.server.openai_responses.request import (
    CUSTOM_INPUT,
    ResponseRequest,
    chat_messages,
    custom_names,
    offered_tools,
    parameter_places,
    tool_choice,
)
from app.server.refusal import FieldPlaces, bad_value, error_document
from app.server.request_log import RequestRecord
from app.server.web.operations import Operation
from app.server.web.responses import EVENTS, AwaitedJson, Document, EventStream, event_bytes
from engine import AnswerBlock, AnswerBlocks, AnswerRequest, Event, Grammar

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]

PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
}  # fmt: skip
"""Prefixes of item ids."""

DELTAS: dict[ItemKind, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Names of delta events by kind of item, without their ending ".delta"."""

NamedEvent = tuple[str, Document]
"""Name and fields of an event."""


@dataclass(slots=True)
class OutputItem:
    """An output item: a message, reasoning, or a tool call.

    Attributes:
        block: its content so far.
        index: its position in the output.
        status: "in_progress", "completed" or "incomplete".
    """

    kind: ItemKind
    block: AnswerBlock
    index: int
    id: str = ""
    status: str = "in_progress"

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    @property
    def text(self) -> str:
        """Text so far; for a custom tool, only its input."""
        text = self.block.text
        return _custom_input(text) if self.kind == "custom_tool_call" else text

    @property
    def is_told(self) -> bool:
        """Whether the item may be sent; truncated input for a custom tool would look complete."""
        return self.kind != "custom_tool_call" or self.status != "incomplete"

    @property
    def _where(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}

    def document(self) -> Document:
        """Return the item in its current state."""
        document: Document = {"type": self.kind, "id": self.id, "status": self.status}
        is_empty = self.status == "in_progress"
        if self.kind == "message":
            return document | {"role": "assistant", "content": [] if is_empty else [self._part()]}
        if self.kind == "reasoning":
            return document | {"summary": [], "content": [] if is_empty else [self._part()]}
        field = "arguments" if self.kind == "function_call" else "input"
        text = "" if is_empty else self.text
        return document | {"call_id": self.block.id, "name": self.block.name, field: text}

    def begin(self) -> Iterator[NamedEvent]:
        """Yield the events that start the item."""
        yield "output_item.added", {"output_index": self.index, "item": self.document()}
        if self.kind in ("message", "reasoning"):
            yield "content_part.added", self._where | {"content_index": 0, "part": self._part("")}

    def add(self, text: str) -> Iterator[NamedEvent]:
        """Yield the delta event for a text; a custom tool's input is only sent at the end."""
        if self.kind != "custom_tool_call":
            name, more = DELTAS[self.kind], self._more()
            yield f"{name}.delta", self._where | more | {"delta": text}

    def end(self, status: str) -> Iterator[NamedEvent]:
        """Set the final status and yield the events that end the item."""
        self.status = status
        if not self.is_told:
            return
        name, text = DELTAS[self.kind], self.text
        if self.kind == "function_call" and status == "incomplete":
            yield f"{name}.delta", self._where | {"delta": misfit(text)}
        if self.kind == "custom_tool_call":
            yield f"{name}.delta", self._where | {"delta": text}
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(self.kind, "text")
        yield f"{name}.done", self._where | self._more() | {field: text}
        if self.kind in ("message", "reasoning"):
            yield "content_part.done", self._where | {"content_index": 0, "part": self._part()}
        yield "output_item.done", {"output_index": self.index, "item": self.document()}

    def _more(self) -> Document:
        if self.kind == "message":
            return {"content_index": 0, "logprobs": []}
        return {"content_index": 0} if self.kind == "reasoning" else {}

    def _part(self, text: str | None = None) -> Document:
        shown = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": shown}
        return {"type": "output_text", "text": shown, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    read = read_arguments(arguments)
    return arguments if read is None else str(read.get(CUSTOM_INPUT, ""))


class ResponseAnswer:
    """The response to a request, built from its answer's events."""

    def __init__(self, request: ResponseRequest, model: str) -> None:
        self._request, self._model = request, model
        self._customs = custom_names(request.tools)
        self._blocks, self._items = AnswerBlocks(), list[OutputItem]()
        self._count = TokenCount()
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._n_sent = 0

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the complete response."""
        async with aclosing(events):
            async for _, event in events:
                for _ in self._events(event):
                    pass  # the items collect the texts
        return self._document()

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""
        is_begun = False
        async with aclosing(events):
            async for _, event in events:
                if not is_begun:
                    is_begun = True
                    yield self._frame("created", {"response": self._document("in_progress")})
                    yield self._frame("in_progress", {"response": self._document("in_progress")})
                for name, fields in self._events(event):
                    yield self._frame(name, fields)
        yield self._frame(self._status, {"response": self._document()})

    def error_event(self, document: Document) -> bytes:
        """Return the event for an error during the stream."""
        error = document["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return event_bytes({"type": "error", "sequence_number": self._n_sent, **fields}, "error")

    @property
    def _status(self) -> str:
        finished = self._blocks.finished
        return "completed" if finished and finished.reason == "stop" else "incomplete"

    def _frame(self, name: str, fields: Document) -> bytes:
        kind, number = f"response.{name}", self._n_sent
        self._n_sent += 1
        return event_bytes({"type": kind, "sequence_number": number, **fields}, kind)

    def _events(self, event: Event) -> Iterator[NamedEvent]:
        self._count.note(event, is_first=True)
        for change, block, text in self._blocks.add(event):
            if change == "begun":
                self._items.append(OutputItem(self._kind(block), block, len(self._items)))
                yield from self._items[-1].begin()
            elif change == "grown":
                yield from self._items[-1].add(text)
            else:
                yield from self._items[-1].end("completed" if block.is_whole else "incomplete")

    def _kind(self, block: AnswerBlock) -> ItemKind:
        if block.kind == "call":
            return "custom_tool_call" if block.name in self._customs else "function_call"
        return "reasoning" if block.kind == "thought" else "message"

    def _document(self, status: str = "") -> Document:
        request, is_over = self._request, not status
        status = status or self._status
        output = [item.document() for item in self._items if item.is_told]
        usage = self._count
        details = None if status != "incomplete" else {"reason": "max_output_tokens"}
        text = {"type": "text"}
        if request.text is not None and request.text.format is not None:
            text = asdict(request.text.format)
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._model, "output": output, "error": None, "incomplete_details": details,
            "instructions": request.instructions or None, "previous_response_id": None,
            "max_output_tokens": request.max_output_tokens, "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": request.temperature, "top_p": request.top_p,
            "tool_choice": _choice(request), "tools": [_plain(asdict(t)) for t in request.tools],
            "text": {"format": _plain(text)}, "truncation": "disabled", "store": False,
            "background": False, "reasoning": {"effort": None, "summary": None},
            "usage": usage.response_document() if is_over else None,
        }  # fmt: skip


def _choice(request: ResponseRequest) -> object:
    choice = request.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else asdict(choice)


def _plain(document: Document) -> Document:
    return {key: value for key, value in document.items() if value not in (None, "")}


async def create_response(
    context: ServerContext, record: RequestRecord, request: ResponseRequest
) -> Response:
    """Answer a conversation."""
    model = context.find(request.model, record)
    refuse_unsupported(request)
    template = response_command(request)
    fields = SamplingFields(temperature=request.temperature, top_p=request.top_p)
    make = sampled(template, fields, context.settings.sampling, request.max_output_tokens)
    places = FieldPlaces("text.format.schema", parameter_places(request.tools))
    events = context.answers(record, 1, make, places)
    answer = ResponseAnswer(request, model.id)
    if request.stream:
        frames = answer.stream(events)
        return EventStream(frames, error_document, context.settings.ping_s, answer.error_event)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_unsupported(request: ResponseRequest) -> None:
    """Raise a `Refusal` if the request uses unsupported fields."""
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            text = "{name} is not supported, because this server does not store conversations."
            raise bad_value(name, text, name=name)
    if request.prompt is not None:
        raise bad_value("prompt", "This server does not store prompts.")
    if request.background:
        raise bad_value("background", "This server does not support background mode.")


def response_command(request: ResponseRequest) -> AnswerRequest:
    """Return the command for a request, without sampling parameters.

    Raises:
        Refusal: the request is not supported.
    """
    effort = (request.reasoning and request.reasoning.effort) or ""
    thinks = False if effort == "none" else None
    return AnswerRequest(
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
    form = request.text and request.text.format
    if not form or form.type == "text":
        return None
    return json_form(form.schema if form.type == "json_schema" else None)


RESPONSES = (
    Operation(
        "/v1/responses", "Answer a conversation (OpenAI's Responses API).",
        create_response, ResponseRequest, streams=EVENTS, has_pictures=True,
    ),
)  # fmt: skip
