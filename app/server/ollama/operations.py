"""The operations of Ollama's protocol."""

from __future__ import annotations

from functools import partial

from app.server.ollama.answering import LINES, chat, generate
from app.server.ollama.embedding import OllamaEmbedRequest, embed
from app.server.ollama.errors import error_document
from app.server.ollama.listing import list_running, list_tags, show, tell_version
from app.server.ollama.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from app.server.web.operation import Operation

_operation = partial(Operation, shape=error_document)

OLLAMA = (
    _operation(
        "/api/chat", "Go on with a conversation, as Ollama has it.", chat, OllamaChatRequest,
        streams=LINES, has_pictures=True,
    ),
    _operation(
        "/api/generate", "Answer a text, as Ollama has it.", generate, OllamaGenerateRequest,
        streams=LINES, has_pictures=True,
    ),
    _operation(
        "/api/embed", "Return the embeddings of texts, as Ollama has it.", embed,
        OllamaEmbedRequest,
    ),
    _operation("/api/tags", "List the models, as Ollama has it.", list_tags),
    _operation("/api/ps", "List the loaded models, as Ollama has it.", list_running),
    _operation("/api/show", "Describe a model, as Ollama has it.", show, OllamaShowRequest),
    _operation("/api/version", "Say which version's protocol this is.", tell_version),
)  # fmt: skip
"""All operations of the protocol."""
