"""Refusals: errors with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine import (
    ApplyTemplate,
    Cancelled,
    ContextOverflow,
    DeviceError,
    EngineCrashed,
    EngineError,
    GrammarError,
    ModelBusy,
    ModelFileError,
    Sentence,
    ToolError,
    text_size,
)

BUSY_S = 5  # Retry-After in seconds when the engine is busy


class Refusal(EngineError):
    """Error in reply to a request, with its HTTP status.

    Attributes:
        param: name of the invalid field, if any.
        code: error code for programs, if any.
        retry_after_s: seconds until a retry may succeed; None if it will not.
    """

    def __init__(
        self, status: int, message: str, hint: str = "", *, param: str | None = None,
        code: str | None = None, retry_after_s: int | None = None, **values: str | int | float,
    ) -> None:  # fmt: skip
        super().__init__(message, hint, **values)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class FieldPlaces:
    """Places, within a request, of the fields that only the engine can validate.

    Attributes:
        form: place of the answer's grammar or schema, or "".
        tools: places of the tools' argument schemas, by tool name.
    """

    form: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)

    def of(self, error: EngineError) -> str | None:
        """Return the place of the field that caused an error, if known."""
        if isinstance(error, ToolError):
            return self.tools.get(error.tool)
        return self.form or None if isinstance(error, GrammarError) else None


NO_PLACES = FieldPlaces()


def placed_text(refusal: Refusal) -> str:
    """Return a refusal's text, including its field, for protocols that have no place for fields."""
    text = f"{refusal} {refusal.hint}".strip()
    param = refusal.param
    return f"{param}: {text}" if param and param not in text else text


def bad_value(param: str, message: str, **values: str | int | float) -> Refusal:
    """Return the refusal for an invalid field."""
    return Refusal(400, Sentence(message, **values), param=param)


MAX_CHARACTERS = 2 << 20  # maximum characters in a conversation to render or count


def check_size(value: object, param: str, most: int = MAX_CHARACTERS) -> None:
    """Check the size of input for the engine.

    Raises:
        Refusal: the input is too long.
    """
    if (n := text_size(value)) > most:
        text = "{place} has {n} characters; at most {most} are allowed."
        raise Refusal(413, text, param=param, place=param, n=n, most=most)


def check_conversation(command: ApplyTemplate) -> None:
    """Check the size of a conversation without its images, which have their own limits.

    Raises:
        Refusal: the conversation is too long.
    """
    texts = [replace(message, pictures=()) for message in command.messages]
    check_size((texts, command.tools, command.variables), "messages")


def server_bug() -> Refusal:
    """Return the refusal for an unexpected exception."""
    return Refusal(500, "The server failed; this is a bug in Tandem.")


def refusal_of(
    error: EngineError, places: FieldPlaces = NO_PLACES, *, back_s: int | None = None,
    lost_hint: str = "",
) -> Refusal:  # fmt: skip
    """Return the refusal for an engine error.

    Args:
        places: places of fields in the request.
        back_s: seconds until a lost model is back; None if the model was not lost.
        lost_hint: hint about a lost model, used instead of the error's.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Cancelled | ModelBusy):
        return Refusal(503, error.message, error.hint, retry_after_s=BUSY_S)
    if isinstance(error, EngineCrashed):
        status, hint = (500, error.hint) if back_s is None else (503, lost_hint)
        return Refusal(status, error.message, hint, code="engine_error", retry_after_s=back_s)
    if isinstance(error, DeviceError | ModelFileError):
        return Refusal(500, error.message, error.hint, code="engine_error")
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    return Refusal(400, error.message, error.hint, param=places.of(error), code=code)


KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_error",
}  # fmt: skip
"""Error types by HTTP status; others are "invalid_request_error"."""


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return OpenAI's error document for a refusal, including its hint."""
    kind = KINDS.get(refusal.status, "invalid_request_error")
    if refusal.status >= 500:
        kind = "server_error"
    text = f"{refusal} {refusal.hint}".strip()
    error = {"message": text, "type": kind, "param": refusal.param, "code": refusal.code}
    return {"error": error}
