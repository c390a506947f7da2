"""Refusals: errors of requests, with their HTTP status."""

from __future__ import annotations

from engine import EngineError


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


def bad_value(param: str, message: str, code: str | None = None) -> Refusal:
    """Return the refusal of a field whose value has no meaning here."""
    return Refusal(400, message, param=param, code=code)
