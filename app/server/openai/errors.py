"""Error documents of OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from app.server.refusal import Refusal

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
