"""Responses made of the events of the engine, whole or as a stream of events."""

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
"""How ids of items begin."""

DELTAS: dict[ItemKind, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Names of the events that tell more of an item."""

NamedEvent = tuple[str, Document]
"""Name and fields of an event of a stream."""


@dataclass(slots=True)
class OutputItem:
    """An item of the answer: a message, a thought, or a call of a tool.

    Attributes:
        block: what has come of it.
        index: its place in the answer.
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
        """Text of the item so far; for a custom tool the input alone."""
        text = self.block.text
        return _custom_input(text) if self.kind == "custom_tool_call" else text

    @property
    def is_told(self) -> bool:
        """Whether it is in the answer; a cut-off input of a custom tool would look whole."""
        return self.kind != "custom_tool_call" or self.status != "incomplete"

    @property
    def _where(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}

    def document(self) -> Document:
        """Return the item as it is now."""
        found: Document = {"type": self.kind, "id": self.id, "status": self.status}
        is_empty = self.status == "in_progress"
        if self.kind == "message":
            return found | {"role": "assistant", "content": [] if is_empty else [self._part()]}
        if self.kind == "reasoning":
            return found | {"summary": [], "content": [] if is_empty else [self._part()]}
        of_what = "arguments" if self.kind == "function_call" else "input"
        text = "" if is_empty else self.text
        return found | {"call_id": self.block.id, "name": self.block.name, of_what: text}

    def begin(self) -> Iterator[NamedEvent]:
        """Yield the events that begin it."""
        yield "output_item.added", {
            "output_index": self.index, "item": self.document(),
        }  # fmt: skip
        if self.kind in ("message", "reasoning"):
            yield "content_part.added", self._where | {"content_index": 0, "part": self._part("")}

    def add(self, text: str) -> Iterator[NamedEvent]:
        """Yield the event that tells more of it; a custom tool's input comes at its end."""
        if self.kind != "custom_tool_call":
            name, more = DELTAS[self.kind], self._more()
            yield f"{name}.delta", self._where | more | {"delta": text}

    def end(self, status: str) -> Iterator[NamedEvent]:
        """Yield the events that end it with a status."""
        self.status = status
        if not self.is_told:
            return
        name, text = DELTAS[self.kind], self.text
        if self.kind == "function_call" and status == "incomplete":
            yield f"{name}.delta", self._where | {"delta": misfit(text)}
        if self.kind == "custom_tool_call":
            yield f"{name}.delta", self._where | {"delta": text}
        of_what = {"function_call": "arguments", "custom_tool_call": "input"}.get(self.kind, "text")
        yield f"{name}.done", self._where | self._more() | {of_what: text}
        if self.kind in ("message", "reasoning"):
            yield "content_part.done", self._where | {"content_index": 0, "part": self._part()}
        yield "output_item.done", {"output_index": self.index, "item": self.document()}

    def _more(self) -> Document:
        """Return what its events tell beside the text."""
        if self.kind == "message":
            return {"content_index": 0, "logprobs": []}
        return {"content_index": 0} if self.kind == "reasoning" else {}

    def _part(self, text: str | None = None) -> Document:
        shown = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": shown}
        return {"type": "output_text", "text": shown, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """Return the input in a custom tool's arguments; themselves where they cannot be read."""
    found = read_arguments(arguments)
    return arguments if found is None else str(found.get(CUSTOM_INPUT, ""))


class ResponseAnswer:
    """The response to a request, made of the events of its answer.

    Args:
        model: id of the model.
    """

    def __init__(self, request: ResponseRequest, model: str) -> None:
        self._request, self._model = request, model
        self._customs = custom_names(request.tools)
        self._blocks, self._items = AnswerBlocks(), list[OutputItem]()
        self._count = TokenCount()
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._n_sent = 0

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the whole response."""
        async with aclosing(events):
            async for _, event in events:
                for _ in self._events(event):
                    pass  # the items keep what is told
        return self._document()

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as events."""
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
        """Return the event that tells a refusal in the middle of the stream."""
        error = document["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return event_bytes({"type": "error", "sequence_number": self._n_sent, **fields}, "error")

    @property
    def _status(self) -> str:
        finished = self._blocks.finished
        return "completed" if finished and finished.reason == "stop" else "incomplete"

    def _frame(self, name: str, fields: Document) -> bytes:
        """Return an event of a stream, whose name its document repeats."""
        kind, number = f"response.{name}", self._n_sent
        self._n_sent += 1
        return event_bytes({"type": kind, "sequence_number": number, **fields}, kind)

    def _events(self, event: Event) -> Iterator[NamedEvent]:
        """Note an event; yield the events of a stream that tell it."""
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
        """Return the response: as it is at the end, or before anything has come."""
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
    """Return a document without fields that are None or empty texts."""
    return {key: value for key, value in document.items() if value not in (None, "")}


async def create_response(
    context: ServerContext, record: RequestRecord, request: ResponseRequest
) -> Response:
    """Answer a conversation.

    Raises:
        Refusal: the request cannot be answered.
    """
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


def response_command(request: ResponseRequest) -> AnswerRequest:
    """Return the command that answers a request, without its sampling.

    Raises:
        Refusal: something in it cannot be done.
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
    """Return the form that the answer must have; None for any."""
    form = request.text and request.text.format
    if not form or form.type == "text":
        return None
    return json_form(form.schema if form.type == "json_schema" else None)


RESPONSES = (
    Operation(
        "/v1/responses", "Answer a conversation, as OpenAI's newer protocol has it.",
        create_response, ResponseRequest, streams=EVENTS, has_pictures=True,
    ),
)  # fmt: skip
"""All operations of the protocol."""
