"""The routes of the Messages protocol."""

from __future__ import annotations

from starlette.responses import Response

from app.server.anthropic.conversation import (
    chat_messages,
    field_places,
    form_of,
    offered_tools,
    tool_choice,
)
from app.server.anthropic.errors import error_document
from app.server.anthropic.message_answer import MessageAnswer, error_event
from app.server.anthropic.message_request import AskedConversation, MessageRequest
from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.chat import EFFORTS
from app.server.openai.sampling import SamplingFields, sampled
from app.server.refusal import bad_value, check_conversation
from app.server.web.responses import AwaitedJson, Document, EventStream
from engine import ApplyTemplate, Generate, TemplateApplied


async def create_message(desk: Desk, record: RequestRecord, request: MessageRequest) -> Response:
    """Answer a conversation.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = desk.find(request.model, record)
    template = message_command(request)
    fields = SamplingFields(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        stop=request.stop_sequences or None,
    )  # fmt: skip
    make = sampled(template, fields, desk.settings.sampling, request.max_tokens)
    events = desk.answers(record, 1, make, field_places(request))
    answer = MessageAnswer(request, model.id)
    if request.stream:
        frames = answer.stream(events)
        return EventStream(frames, error_document, desk.settings.ping_s, error_event)
    return AwaitedJson(lambda: answer.collect(events), error_document)


async def count_tokens(desk: Desk, record: RequestRecord, request: AskedConversation) -> Response:
    """Return the number of tokens of a conversation's prompt.

    Raises:
        Refusal: it is too long, or the model does not take it.
    """
    desk.find(request.model, record)
    asked = message_command(request)
    command = ApplyTemplate(
        asked.messages, asked.tools, continue_last=asked.continue_last, thinks=asked.thinks,
        effort=asked.effort,
    )  # fmt: skip
    check_conversation(command)

    async def make() -> Document:
        done = await desk.run(record, command)
        assert isinstance(done, TemplateApplied), "the closing event of this command"
        return {"input_tokens": done.n_tokens}

    return AwaitedJson(make, error_document)


def message_command(request: AskedConversation) -> Generate:
    """Return the command that answers a conversation, without its sampling.

    A last message of the assistant is continued, as Anthropic has it.

    Raises:
        Refusal: something in it cannot be done.
    """
    if request.mcp_servers:
        raise bad_value("mcp_servers", "This server does not connect to MCP servers itself.")
    messages = chat_messages(request)
    is_continued = messages[-1].role == "assistant"
    if is_continued and messages[-1].tool_calls:
        raise bad_value("messages", "The last call of a tool has no result in the conversation.")
    effort = (request.output_config and request.output_config.effort) or ""
    thinks = None if request.thinking is None else request.thinking.type != "disabled"
    wish = request.tool_choice
    return Generate(
        messages,
        timed_every=0,
        continue_last=is_continued,
        thinks=thinks,
        effort=EFFORTS.get(effort, effort),
        tools=offered_tools(request.tools),
        tool_choice=tool_choice(request),
        parallel_tool_calls=wish is None or not wish.disable_parallel_tool_use,
        in_parts=True,
        grammar=form_of(request),
    )
