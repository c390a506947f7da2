"""Error documents of Anthropic's protocol."""

from __future__ import annotations

from typing import Any

from app.server.refusal import Refusal, placed_text

KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
"""Names of kinds of errors by HTTP status; others are "invalid_request_error" or "api_error"."""


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return the document that tells a refusal, its hint and its place included."""
    other = "api_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"type": KINDS.get(refusal.status, other), "message": placed_text(refusal)}
    return {"type": "error", "error": error}
