"""HTTP operations and their OpenAPI 3.1 description."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from app.server.context import ServerContext
from app.server.refusal import error_document
from app.server.request_log import RequestRecord
from app.server.web.responses import ErrorShape
from engine import JsonSchema, document_schema, package_version

Act = Callable[[ServerContext, RequestRecord, Any], Awaitable[Response]]
"""Handler that takes the validated body, or the request if it has none; may raise `Refusal`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP operation: a method and a path, with the request type and handler.

    Attributes:
        path: path in Starlette's syntax.
        takes: type of the request body, if any.
        streams: media type of streamed responses, or "".
        media_type: media type of other responses.
        shape: format of errors.
        has_pictures: whether the request body may contain images.
    """

    path: str
    summary: str
    act: Act
    takes: type | None = None
    streams: str = ""
    media_type: str = "application/json"
    shape: ErrorShape = error_document
    has_pictures: bool = False

    @property
    def method(self) -> str:
        """The HTTP method: POST if there is a body."""
        return "GET" if self.takes is None else "POST"


STATUSES = {
    "400": "The request is invalid.",
    "401": "The key is missing or wrong.",
    "403": "The host name or web page is not allowed.",
    "404": "There is no such model or path.",
    "408": "The client was too slow to send the request or read the answer.",
    "413": "The request is too large.",
    "429": "Too many answers are waiting.",
    "500": "The engine failed.",
    "503": "The model cannot be loaded now.",
}
"""Descriptions for error responses by HTTP status."""

ERROR: JsonSchema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message"]}},
}
"""Schema that all error responses share."""


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document for all operations."""
    named: dict[str, JsonSchema] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for operation in operations:
        path = re.sub(r":\w+}", "}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, path, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": package_version() or "0"},
        "paths": paths,
        "components": {
            "schemas": named,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _described(operation: Operation, path: str, named: dict[str, JsonSchema]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type.partition(";")[0]: {}}
    if operation.streams:
        content[operation.streams] = {}
    if operation.media_type == "application/json":
        content[operation.media_type] = {"schema": {"type": "object"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {
        status: {"description": text, "content": error} for status, text in STATUSES.items()
    }
    document: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **responses},
    }
    if names := re.findall(r"{(\w+)}", path):
        document["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.takes is not None:
        schema = document_schema(operation.takes, named)
        body = {"application/json": {"schema": schema}}
        document["requestBody"] = {"required": True, "content": body}
    return document
