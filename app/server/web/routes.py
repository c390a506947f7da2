"""The ASGI application: routes, request logging and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.anthropic.messages import ANTHROPIC
from app.server.anthropic.messages import error_document as anthropic_error
from app.server.context import ServerContext
from app.server.ollama.answer import OLLAMA
from app.server.ollama.answer import error_document as ollama_error
from app.server.openai.routes import OPENAI
from app.server.openai_responses.answer import RESPONSES
from app.server.refusal import Refusal, refusal_of, server_bug
from app.server.refusal import error_document as openai_error
from app.server.request_body import SMALL_BODY, read_body
from app.server.request_fields import read_request
from app.server.request_log import RequestRecord
from app.server.settings import ServerSettings
from app.server.web.access import AccessMiddleware
from app.server.web.operations import Operation, openapi_document
from app.server.web.responses import ErrorShape, json_bytes, refusal_response
from app.server.web.state import STATE
from engine import EngineError

log = logging.getLogger(__name__)

OLLAMA_PATHS = "/api"  # prefix of Ollama's paths
OPERATIONS = (*OPENAI, *RESPONSES, *ANTHROPIC, *STATE)  # operations that all servers have
SHAPES: Mapping[str, ErrorShape] = {"/v1/messages": anthropic_error, OLLAMA_PATHS: ollama_error}
"""Error formats by path prefix; the default is OpenAI's."""


def make_app(context: ServerContext) -> Starlette:
    """Return the ASGI application for a context."""
    operations = OPERATIONS + (OLLAMA if context.settings.has_ollama else ())

    @cache  # this takes a while, and all other clients would have to wait
    def description() -> bytes:
        return json_bytes(openapi_document(operations))

    async def describe(context: ServerContext, record: RequestRecord, request: Request) -> Response:
        return Response(description(), media_type="application/json")

    page = Operation("/openapi.json", "Return this OpenAPI document.", describe)
    return Starlette(
        routes=[_route(context, one) for one in (*operations, page)],
        middleware=[
            Middleware(RequestLogMiddleware, context=context),
            Middleware(AccessMiddleware, settings=context.settings, shape_of=shape_of),
        ],
        exception_handlers={HTTPException: partial(_not_routed, context.settings)},
    )


def shape_of(path: str) -> ErrorShape:
    """Return the error format for a path."""
    shapes = (shape for begin, shape in SHAPES.items() if f"{path}/".startswith(f"{begin}/"))
    return next(shapes, openai_error)


def _route(context: ServerContext, operation: Operation) -> Route:
    async def answer(request: Request) -> Response:
        record: RequestRecord = request.state.record
        record.route = f"{operation.method} {operation.path}"
        try:
            return await operation.act(context, record, await _parsed(context, operation, request))
        except EngineError as error:
            # no local variable, which would form a cycle with the traceback that holds the body
            record.problem = str(refusal_of(error))
            return refusal_response(refusal_of(error), operation.shape)

    return Route(operation.path, answer, methods=[operation.method])


async def _parsed(context: ServerContext, operation: Operation, request: Request) -> Any:
    if operation.takes is None:
        return request
    settings = context.settings
    most = settings.most_body + settings.most_pictures * operation.has_pictures
    body = await read_body(request, settings, context.request_log, most)
    if len(body) <= SMALL_BODY:
        return read_request(operation.takes, body, settings.most_body)
    async with context.parsing:
        return await asyncio.to_thread(read_request, operation.takes, body, settings.most_body)


async def _not_routed(settings: ServerSettings, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the handler of this error"
    path, shape = request.url.path, shape_of(request.url.path)
    text, hint = "There is no {path}.", ""
    if error.status_code == 405:
        text = "{path} does not support {method}."
    elif shape is ollama_error and not settings.has_ollama:
        text, hint = "Ollama's API is not enabled on this server.", settings.hints.ollama
    refusal = Refusal(error.status_code, text, hint, path=path[:100], method=request.method[:20])
    request.state.record.problem = str(refusal)
    response = refusal_response(refusal, shape)
    response.headers.update(error.headers or {})
    return response


class RequestLogMiddleware:
    """Logs each request with its status and duration; unexpected exceptions become status 500."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._request_log = app, context.request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client") or ("unknown", 0)
        record = self._request_log.begin(client[0], scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_logged)
        except Exception as error:  # a bug must not end the connection silently
            log.exception("request %d failed", record.number)
            record.problem = f"{type(error).__name__}: {error}"
            if not record.status:
                shape = shape_of(scope["path"])
                await refusal_response(server_bug(), shape)(scope, receive, send_logged)
        finally:
            self._request_log.end(record)
