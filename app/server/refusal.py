"""Refusals: errors of requests, with their HTTP status."""

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
    ToolError,
    text_size,
)

BUSY_S = 5
"""Seconds after which a request that the engine had no time for may be sent again."""


class Refusal(EngineError):
    """Error of a request, with the HTTP status that tells it.

    Attributes:
        param: name of the field that is wrong; None if it is none.
        code: short name of the reason for programs; None for none.
        retry_after_s: seconds after which the same request may be answered; None if never.
    """

    def __init__(
        self, status: int, message: str, hint: str = "", *, param: str | None = None,
        code: str | None = None, retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class FieldPlaces:
    """Places in a request of what only the engine can check.

    Attributes:
        form: place of the grammar or schema of the answer; "" for none.
        tools: places of the schemas of functions' arguments, by the name of the function.
    """

    form: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)

    def of(self, error: EngineError) -> str | None:
        """Return the place of what an error is about; None where it is none of these."""
        if isinstance(error, ToolError):
            return self.tools.get(error.tool)
        return self.form or None if isinstance(error, GrammarError) else None


NO_PLACES = FieldPlaces()
"""Places in a request without forms and functions."""


def placed_text(refusal: Refusal) -> str:
    """Return the sentences of a refusal with its place, for protocols without a field for that."""
    text = f"{refusal} {refusal.hint}".strip()
    param = refusal.param
    return f"{param}: {text}" if param and param not in text else text


def bad_value(param: str, message: str, code: str | None = None) -> Refusal:
    """Return the refusal of a field whose value has no meaning here."""
    return Refusal(400, message, param=param, code=code)


MAX_CHARACTERS = 2 << 20
"""Maximum characters of a conversation to render or count."""


def check_size(given: object, param: str, most: int = MAX_CHARACTERS) -> None:
    """Check the size of what the engine will read.

    Raises:
        Refusal: it is too long.
    """
    if (n := text_size(given)) > most:
        text = f"{param} has {n} characters, at most {most} are read at once."
        raise Refusal(413, text, param=param)


def check_conversation(command: ApplyTemplate) -> None:
    """Check the size of a conversation without its pictures, which have limits of their own.

    Raises:
        Refusal: it is too long.
    """
    texts = [replace(message, pictures=()) for message in command.messages]
    check_size((texts, command.tools, command.variables), "messages")


def server_bug() -> Refusal:
    """Return the refusal of a request that an unexpected error has ended."""
    return Refusal(500, "The server has failed, which is a bug in Tandem.")


def refusal_of(
    error: EngineError, places: FieldPlaces = NO_PLACES, *, back_s: int | None = None,
    lost_hint: str = "",
) -> Refusal:  # fmt: skip
    """Return how an error of the engine is told to a client.

    Args:
        places: places in the request.
        back_s: seconds after which a model that the error has cost is back; None if it has not.
        lost_hint: sentence on that model, in place of what a window would say.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Cancelled | ModelBusy):
        return Refusal(503, str(error), error.hint, retry_after_s=BUSY_S)
    if isinstance(error, EngineCrashed):
        status, hint = (500, error.hint) if back_s is None else (503, lost_hint)
        return Refusal(status, str(error), hint, code="engine_error", retry_after_s=back_s)
    if isinstance(error, DeviceError | ModelFileError):
        return Refusal(500, str(error), error.hint, code="engine_error")
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    return Refusal(400, str(error), error.hint, param=places.of(error), code=code)


KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_error",
}  # fmt: skip
"""Names of kinds of errors by HTTP status; others are "invalid_request_error"."""


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return the document that tells a refusal, its hint included."""
    kind = KINDS.get(refusal.status, "invalid_request_error")
    if refusal.status >= 500:
        kind = "server_error"
    text = f"{refusal} {refusal.hint}".strip()
    found = {"message": text, "type": kind, "param": refusal.param, "code": refusal.code}
    return {"error": found}
