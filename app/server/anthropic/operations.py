"""The operations of the Messages protocol."""

from __future__ import annotations

from app.server.anthropic.errors import error_document
from app.server.anthropic.message_request import AskedConversation, MessageRequest
from app.server.anthropic.messages import count_tokens, create_message
from app.server.web.operation import Operation
from app.server.web.responses import EVENTS

ANTHROPIC = (
    Operation(
        "/v1/messages", "Answer a conversation, as Anthropic has it.", create_message,
        MessageRequest, streams=EVENTS, shape=error_document, has_pictures=True,
    ),
    Operation(
        "/v1/messages/count_tokens", "Count the tokens of a conversation's prompt.",
        count_tokens, AskedConversation, shape=error_document, has_pictures=True,
    ),
)  # fmt: skip
"""All operations of the protocol."""
