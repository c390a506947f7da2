"""The operations in OpenAI's protocol, and chat completions."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from app.server.context import ServerContext
from app.server.models import OfferedModel, capabilities_of, find_model
from app.server.openai.answer import ChatAnswer
from app.server.openai.conversation import (
    ChatRequest,
    chat_messages,
    form_of,
    form_place,
    offered_tools,
    parameter_places,
    tool_choice,
)
from app.server.openai.sampling import sampled
from app.server.openai.texts import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TemplateRequest,
    TokenizeRequest,
    apply_template,
    completions,
    detokenize,
    embeddings,
    tokenize,
)
from app.server.refusal import FieldPlaces, bad_value, error_document
from app.server.request_log import RequestRecord
from app.server.web.operations import Operation
from app.server.web.responses import EVENTS, AwaitedJson, Document, EventStream, json_response
from engine import AnswerRequest

EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that have another name in the engine."""


async def chat_completions(
    context: ServerContext, record: RequestRecord, request: ChatRequest
) -> Response:
    """Answer a conversation."""
    model = context.find(request.model, record)
    refuse_unsupported(request)
    template = chat_command(request)
    limit = request.max_completion_tokens
    most = request.max_tokens if limit is None else limit
    make = sampled(template, request, context.settings.sampling, most)
    places = FieldPlaces(form_place(request), parameter_places(request.tools))
    events = context.answers(record, request.n, make, places)
    spell = await context.spelling.of(model.info.path) if request.logprobs else None
    answer = ChatAnswer(request, model.id, spell)
    if request.stream:
        return EventStream(answer.stream(events), error_document, context.settings.ping_s)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_unsupported(request: ChatRequest) -> None:
    """Raise a `Refusal` if request fields are unsupported or contradict each other."""
    if request.audio is not None or set(request.modalities) - {"text"}:
        raise bad_value("modalities", "Only text output is supported, not audio or images.")
    if request.functions or request.function_call is not None:
        raise bad_value("functions", "functions is deprecated; use tools.")
    if request.web_search_options is not None:
        raise bad_value("web_search_options", "The model cannot search the web.")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        text = "continue_final_message requires the last message to be the assistant's."
        raise bad_value("continue_final_message", text)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "top_logprobs requires logprobs to be true.")


def chat_command(request: ChatRequest) -> AnswerRequest:
    """Return the command for a request, without sampling parameters.

    Raises:
        Refusal: the request is not supported.
    """
    variables = request.chat_template_kwargs or {}
    effort = request.reasoning_effort or ""
    thinks = variables.get("enable_thinking")
    if effort == "none":
        thinks, effort = False, ""
    return AnswerRequest(
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


def _document(model: OfferedModel) -> Document:
    """Describe a model with fields that clients know from other servers.

    `meta` comes from llama.cpp, `max_model_len` from vLLM, `context_length` from model hubs, and
    `capabilities` from Ollama. A remote Tandem uses `pictures` to count the tokens in images.
    """
    info = model.info
    meta = {
        "n_vocab": info.n_vocab, "n_ctx_train": info.n_ctx_train, "n_embd": info.n_embd,
        "n_params": info.n_params, "size": info.n_bytes, "ftype": info.quant,
    }  # fmt: skip
    document: Document = {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "tandem",
        "name": info.name, "architecture": info.architecture, "quantization": info.quant,
        "n_params": info.n_params, "size_bytes": info.n_bytes, "n_vocab": info.n_vocab,
        "n_ctx_train": info.n_ctx_train, "loaded": model.n_ctx is not None,
        "capabilities": capabilities_of(info, sees=model.vision is not None), "meta": meta,
    }  # fmt: skip
    if model.n_ctx is not None:
        meta["n_ctx"] = model.n_ctx
        document |= dict.fromkeys(("n_ctx", "max_model_len", "context_length"), model.n_ctx)
    if model.vision is not None:
        document["pictures"] = model.vision.sizes()
    return document


async def _list_models(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    models = [_document(model) for model in context.models.offered()]
    return json_response({"object": "list", "data": models})


async def _show_model(context: ServerContext, record: RequestRecord, request: Request) -> Response:
    return json_response(_document(find_model(context.models, request.path_params["model"])))


OPENAI = (
    Operation(
        "/v1/chat/completions", "Answer a conversation.", chat_completions, ChatRequest, EVENTS,
        has_pictures=True,
    ),
    Operation("/v1/completions", "Complete a text.", completions, CompletionRequest, EVENTS),
    Operation("/v1/embeddings", "Compute embeddings of texts.", embeddings, EmbeddingRequest),
    Operation("/v1/models", "List the models.", _list_models),
    Operation("/v1/models/{model:path}", "Describe a model.", _show_model),
    Operation("/tokenize", "Tokenize a text.", tokenize, TokenizeRequest),
    Operation("/detokenize", "Detokenize tokens.", detokenize, DetokenizeRequest),
    Operation(
        "/apply-template", "Apply the chat template.", apply_template, TemplateRequest,
        has_pictures=True,
    ),
)  # fmt: skip
