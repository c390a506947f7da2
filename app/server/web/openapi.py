"""The description of the server in OpenAPI 3.1, made of the operations and their requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from app.server.requests.reading import schema_of
from app.server.requests.shapes import Schema
from app.server.web.operation import Operation
from engine import package_version

STATUSES = {
    "400": "The request cannot be answered as it is.",
    "401": "The key is missing or wrong.",
    "403": "The host or web page may not ask.",
    "404": "There is no such model or path.",
    "408": "The request came too slowly.",
    "413": "The request is too large.",
    "429": "Too many answers are waiting.",
    "500": "The engine has failed.",
    "503": "The model cannot be loaded now.",
}
"""What operations may answer instead, by HTTP status."""

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message"]}},
}
"""What stands in such an answer, whatever the protocol."""


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the description of all operations."""
    named: dict[str, Schema] = {"Error": ERROR}
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


def _described(operation: Operation, path: str, named: dict[str, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type.partition(";")[0]: {}}
    if operation.streams:
        content[operation.streams] = {}
    if operation.media_type == "application/json":
        content[operation.media_type] = {"schema": {"type": "object"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {
        status: {"description": text, "content": error} for status, text in STATUSES.items()
    }
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **responses},
    }
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.takes is not None:
        schema = schema_of(operation.takes, named)
        body = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": True, "content": body}
    return found
