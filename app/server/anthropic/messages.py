"""The Messages protocol: its routes, and messages built from engine events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from app.server.anthropic.request import (
    AskedConversation,
    MessageRequest,
    chat_messages,
    field_places,
    form_of,
    offered_tools,
    tool_choice,
)
from app.server.context import AnswerEvents, ServerContext
from app.server.openai.answer import read_arguments
from app.server.openai.routes import EFFORTS
from app.server.openai.sampling import SamplingFields, sampled
from app.server.refusal import Refusal, bad_value, check_conversation, placed_text
from app.server.request_log import RequestRecord
from app.server.web.operations import Operation
from app.server.web.responses import EVENTS, AwaitedJson, Document, EventStream, event_bytes
from engine import (
    AnswerBlock,
    AnswerBlocks,
    AnswerRequest,
    ApplyTemplate,
    Event,
    Finished,
    PrefillProgress,
    TemplateApplied,
    Usage,
)

REASONS = {
    "stop": "end_turn", "length": "max_tokens", "context": "model_context_window_exceeded",
    "cancelled": "max_tokens",
}  # fmt: skip
"""Stop reasons by finish reason; an answer that timed out counts as "max_tokens"."""


def begun_block(block: AnswerBlock) -> Document:
    """Return a content block's initial form, without content."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def block_delta(block: AnswerBlock, text: str) -> Document:
    """Return the delta that appends a text to a content block."""
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    kind = "thinking" if block.kind == "thought" else "text"
    return {"type": f"{kind}_delta", kind: text}


def whole_block(block: AnswerBlock) -> Document:
    """Return a complete content block."""
    if block.kind == "call":
        return begun_block(block) | {"input": read_arguments(block.text)}
    return begun_block(block) | {"thinking" if block.kind == "thought" else "text": block.text}


class MessageAnswer:
    """The response to a request, built from its answer's events.

    Even in a stream, a tool call is sent only once it is complete, because clients run every call
    that has started, whatever the stop reason, and their SDKs complete truncated arguments.
    """

    def __init__(self, request: MessageRequest, model: str) -> None:
        self._stops = request.stop_sequences
        self._blocks = AnswerBlocks()
        self._shown: list[AnswerBlock] = []
        self._reason, self._stop = "", ""
        self._usage = Usage()
        self._head: Document = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant",
            "model": model,
        }  # fmt: skip

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the complete response."""
        async with aclosing(events):
            async for _, event in events:
                for _ in self._events(event):
                    pass  # the blocks collect the texts
        content = [whole_block(block) for block in self._shown]
        return {**self._head, "content": content, **self._end(), "usage": self._counts()}

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""
        is_begun = False
        async with aclosing(events):
            async for _, event in events:
                if not is_begun:
                    is_begun = True
                    yield _frame("message_start", message=self._beginning(event))
                for kind, fields in self._events(event):
                    yield _frame(kind, **fields)
        yield _frame("message_delta", delta=self._end(), usage=self._counts())
        yield _frame("message_stop")

    def _beginning(self, event: Event) -> Document:
        n = event.total if isinstance(event, PrefillProgress) else 0
        usage = {
            "input_tokens": n, "output_tokens": 0, "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        }  # fmt: skip
        empty: Document = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {**self._head, **empty, "usage": usage}

    def _events(self, event: Event) -> Iterator[tuple[str, Document]]:
        for change, block, text in self._blocks.add(event):
            if block.kind != "call":
                yield from self._change(change, block, text)
            elif change == "grown":
                yield "ping", {}  # without events, clients would time out
            elif change == "ended" and block.is_whole and read_arguments(block.text) is not None:
                yield from self._change("begun", block, "")
                yield from self._change("grown", block, block.text)
                yield from self._change("ended", block, "")
        if isinstance(event, Finished):
            has_called = any(block.kind == "call" for block in self._shown)
            is_called = has_called and event.reason == "stop"
            self._stop = event.stop if event.stop in self._stops else ""
            self._reason = "stop_sequence" if self._stop else REASONS[event.reason]
            self._reason = "tool_use" if is_called else self._reason
            self._usage = event.usage

    def _change(self, change: str, block: AnswerBlock, text: str) -> Iterator[tuple[str, Document]]:
        if change == "begun":
            self._shown.append(block)
        index = len(self._shown) - 1
        if change == "begun":
            begun = begun_block(block)
            yield "content_block_start", {"index": index, "content_block": begun}
        elif change == "grown":
            yield "content_block_delta", {"index": index, "delta": block_delta(block, text)}
        else:
            yield "content_block_stop", {"index": index}

    def _end(self) -> Document:
        return {"stop_reason": self._reason, "stop_sequence": self._stop or None}

    def _counts(self) -> Document:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
        }


def _frame(kind: str, **fields: object) -> bytes:
    return event_bytes({"type": kind, **fields}, kind)


def error_event(document: Document) -> bytes:
    """Return the event for an error during a stream."""
    return event_bytes(document, "error")


KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
"""Error types by HTTP status; others are "invalid_request_error" or "api_error"."""


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return the error document for a refusal, including its hint and field."""
    other = "api_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"type": KINDS.get(refusal.status, other), "message": placed_text(refusal)}
    return {"type": "error", "error": error}


async def create_message(
    context: ServerContext, record: RequestRecord, request: MessageRequest
) -> Response:
    """Answer a conversation."""
    model = context.find(request.model, record)
    template = message_command(request)
    fields = SamplingFields(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        stop=request.stop_sequences or None,
    )  # fmt: skip
    make = sampled(template, fields, context.settings.sampling, request.max_tokens)
    events = context.answers(record, 1, make, field_places(request))
    answer = MessageAnswer(request, model.id)
    if request.stream:
        frames = answer.stream(events)
        return EventStream(frames, error_document, context.settings.ping_s, error_event)
    return AwaitedJson(lambda: answer.collect(events), error_document)


async def count_tokens(
    context: ServerContext, record: RequestRecord, request: AskedConversation
) -> Response:
    """Count the tokens in a conversation's prompt."""
    context.find(request.model, record)
    template = message_command(request)
    command = ApplyTemplate(
        template.messages, template.tools, continue_last=template.continue_last,
        thinks=template.thinks, effort=template.effort,
    )  # fmt: skip
    check_conversation(command)

    async def make() -> Document:
        done = await context.run(record, command)
        assert isinstance(done, TemplateApplied), "the closing event of this command"
        return {"input_tokens": done.n_tokens}

    return AwaitedJson(make, error_document)


def message_command(request: AskedConversation) -> AnswerRequest:
    """Return a request's command, without sampling; a final assistant message is continued.

    Raises:
        Refusal: the request is not supported.
    """
    if request.mcp_servers:
        raise bad_value("mcp_servers", "This server does not connect to MCP servers itself.")
    messages = chat_messages(request)
    is_continued = messages[-1].role == "assistant"
    if is_continued and messages[-1].tool_calls:
        raise bad_value("messages", "The last tool call has no result in the conversation.")
    effort = (request.output_config and request.output_config.effort) or ""
    thinks = None if request.thinking is None else request.thinking.type != "disabled"
    choice = request.tool_choice
    return AnswerRequest(
        messages,
        timed_every=0,
        continue_last=is_continued,
        thinks=thinks,
        effort=EFFORTS.get(effort, effort),
        tools=offered_tools(request.tools),
        tool_choice=tool_choice(request),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        in_parts=True,
        grammar=form_of(request),
    )


ANTHROPIC = (
    Operation(
        "/v1/messages", "Answer a conversation (Anthropic).", create_message,
        MessageRequest, streams=EVENTS, shape=error_document, has_pictures=True,
    ),
    Operation(
        "/v1/messages/count_tokens", "Count the tokens in a conversation's prompt (Anthropic).",
        count_tokens, AskedConversation, shape=error_document, has_pictures=True,
    ),
)  # fmt: skip
