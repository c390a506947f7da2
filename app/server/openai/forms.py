"""The form that an answer must have, as requests ask for it in several ways."""

from __future__ import annotations

import json

from app.server.openai.chat_request import AnyCompletion, ResponseFormat
from app.server.refusal import bad_value
from app.server.requests.reading import JsonObject
from engine import Grammar

ANY_OBJECT = '{"type": "object"}'
"""JSON schema of an object with anything inside."""


def form_of(request: AnyCompletion) -> Grammar | None:
    """Return the form that the answer must have; None for any.

    Raises:
        Refusal: the request asks for several.
    """
    asked = []
    if request.grammar:
        asked.append(Grammar("gbnf", request.grammar))
    if request.regex:
        asked.append(Grammar("regex", request.regex))
    if request.response_format is not None and request.response_format.type != "text":
        asked.append(json_form(_schema(request.response_format)))
    if len(asked) > 1:
        raise bad_value(
            "response_format", "Only one of response_format, grammar and regex can be asked for."
        )
    return asked[0] if asked else None


def form_place(request: AnyCompletion) -> str:
    """Return the place of the form that the answer must have."""
    for name in ("grammar", "regex"):
        if getattr(request, name):
            return name
    asked = request.response_format
    is_named = asked is not None and asked.type == "json_schema"
    return "response_format.json_schema.schema" if is_named else "response_format.schema"


def _schema(asked: ResponseFormat) -> JsonObject | None:
    """Return the JSON schema that is asked for; None for any object."""
    if asked.type != "json_schema":
        return asked.schema
    if asked.json_schema is None:
        place = "response_format.json_schema"
        raise bad_value(place, f"{place} is missing.")
    return asked.json_schema.schema


def json_form(schema: JsonObject | None) -> Grammar:
    """Return the form of JSON with a schema, or of any object."""
    text = ANY_OBJECT if schema is None else json.dumps(schema, ensure_ascii=False)
    return Grammar("json_schema", text)
