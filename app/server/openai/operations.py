"""The operations of OpenAI's protocol, and those that llama.cpp's server has beside them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.chat import chat_completions
from app.server.openai.chat_request import ChatRequest
from app.server.openai.model_list import list_document, model_document
from app.server.openai.texts.completion_request import CompletionRequest
from app.server.openai.texts.completions import completions
from app.server.openai.texts.embeddings import EmbeddingRequest, embeddings
from app.server.openai.texts.text_routes import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    apply_template,
    detokenize,
    tokenize,
)
from app.server.web.operation import Operation
from app.server.web.responses import EVENTS, json_response


async def _list_models(desk: Desk, record: RequestRecord, request: Request) -> Response:
    return json_response(list_document(desk))


async def _show_model(desk: Desk, record: RequestRecord, request: Request) -> Response:
    return json_response(model_document(desk, request.path_params["model"]))


OPENAI = (
    Operation(
        "/v1/chat/completions", "Answer a conversation.", chat_completions, ChatRequest, EVENTS,
        has_pictures=True,
    ),
    Operation("/v1/completions", "Go on with a text.", completions, CompletionRequest, EVENTS),
    Operation("/v1/embeddings", "Return the embeddings of texts.", embeddings, EmbeddingRequest),
    Operation("/v1/models", "List the models.", _list_models),
    Operation("/v1/models/{model:path}", "Describe a model.", _show_model),
    Operation("/tokenize", "Turn a text into tokens.", tokenize, TokenizeRequest),
    Operation("/detokenize", "Turn tokens into a text.", detokenize, DetokenizeRequest),
    Operation(
        "/apply-template", "Turn a conversation into a prompt.", apply_template, TemplateRequest,
        has_pictures=True,
    ),
)  # fmt: skip
"""All operations of the protocol."""
