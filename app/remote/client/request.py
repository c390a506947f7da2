"""Requests in OpenAI's form, as https://platform.openai.com/docs/api-reference/chat describes them.

Any server gets what that page names. Our own fields go to a Tandem alone, as others refuse them.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from app.core.translation import tr
from engine import (
    IMAGE_PLACEHOLDER,
    ChatMessage,
    EngineError,
    Generate,
    ImageFile,
    SamplingParams,
    Tool,
    image_base64,
)

STANDARD = (
    "max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop",
)  # fmt: skip
"""Fields of `SamplingParams` that OpenAI's interface has, by the same names."""

FORMS = ("json_schema", "grammar", "regex")
"""Fields of `SamplingParams` that ask for a form of the answer, see `_form`."""

OWN_FORMS = {"gbnf": "grammar", "regex": "regex"}
"""Fields of forms that only a Tandem has, by the kind of the grammar."""

KINDS = {
    b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif",
    b"BM": "image/bmp",
}  # fmt: skip
"""Types of pictures by the first bytes of their files; the rest is WebP."""

FORBIDS = -100.0
"""Bias with which a token never comes, as JSON has no infinite numbers."""


def request_of(command: Generate, model: str, *, is_tandem: bool) -> dict[str, Any]:
    """Return the body of a request that a command asks for.

    Raises:
        EngineError: the server cannot do what is asked for.
    """
    body: dict[str, Any] = {"model": model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if command.prompt is None:
        body |= conversation_document(command.messages, command.tools)
        if command.tools:
            body["tool_choice"] = _choice(command.tool_choice)
            body["parallel_tool_calls"] = command.parallel_tool_calls
    else:
        body["prompt"] = command.prompt
    body |= _sampling(command.sampling, is_tandem=is_tandem)
    body |= _form(command, is_tandem=is_tandem)
    if is_tandem:
        body |= _own(command)
    return body


def conversation_document(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
) -> dict[str, Any]:
    """Return the fields of a conversation and of the functions that the model may call."""
    found: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    if tools:
        found["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    return found


def _message(message: ChatMessage) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content
    if message.pictures:
        content = _parts(message)
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    """Return the text and the pictures of a message, each where it stands.

    Raises:
        EngineError: the file of a picture cannot be read.
    """
    texts = message.content.split(IMAGE_PLACEHOLDER)
    n_first = max(0, len(message.pictures) - len(texts) + 1)
    shown = [{"type": "image_url", "image_url": {"url": _data_uri(p)}} for p in message.pictures]
    parts: list[dict[str, Any]] = list(shown[:n_first])
    for text, behind in zip_longest(texts, shown[n_first:]):
        if text:
            parts.append({"type": "text", "text": text})
        if behind is not None:
            parts.append(behind)
    return parts


def _data_uri(picture: ImageFile | str) -> str:
    """Return a picture as an address that holds all of it (RFC 2397)."""
    if isinstance(picture, ImageFile):
        picture = image_base64(picture.path)
    head = b64decode(picture[:24])
    kind = next((kind for mark, kind in KINDS.items() if head.startswith(mark)), "image/webp")
    return f"data:{kind};base64,{picture}"


def _function(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tool.name}
    if tool.description:
        found["description"] = tool.description
    if tool.parameters:
        found["parameters"] = json.loads(tool.parameters)
    return found


def _choice(choice: str) -> str | dict[str, Any]:
    if choice.startswith("="):
        return {"type": "function", "function": {"name": choice[1:]}}
    return choice


def _sampling(params: SamplingParams, *, is_tandem: bool) -> dict[str, Any]:
    """Return the fields of sampling: those that everybody knows, and all for a Tandem."""
    found: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    others = [spec for spec in fields(SamplingParams) if spec.name not in (*found, *FORMS)]
    for spec in others:
        value = getattr(params, spec.name)
        is_standard = spec.name in STANDARD and value != spec.default
        if is_standard or (is_tandem and spec.name not in STANDARD):
            found[spec.name] = value
    if is_tandem:
        found["logit_bias"] = {str(token): max(bias, FORBIDS) for token, bias in params.logit_bias}
    return found


def _form(command: Generate, *, is_tandem: bool) -> dict[str, Any]:
    """Return the field of the form that an answer must have.

    Raises:
        EngineError: the server has no field for it.
    """
    grammar = command.grammar or command.sampling.form
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        schema: Mapping[str, Any] = {"name": "answer", "schema": json.loads(grammar.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if is_tandem and grammar.kind in OWN_FORMS and not grammar.trigger:
        return {OWN_FORMS[grammar.kind]: grammar.text}
    raise EngineError(
        tr("This server cannot hold answers to such a grammar."),
        tr("Use a JSON schema, or a model on this machine."),
    )


def _own(command: Generate) -> dict[str, Any]:
    """Return the fields that only a Tandem has."""
    found: dict[str, Any] = {}
    variables = json.loads(command.variables) if command.variables else {}
    if command.thinks is not None:
        variables["enable_thinking"] = command.thinks
    if variables:
        found["chat_template_kwargs"] = variables
    if command.effort:
        found["reasoning_effort"] = command.effort
    if command.continue_last:
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    return found
