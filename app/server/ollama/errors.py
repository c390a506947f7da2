"""Error documents of Ollama's protocol."""

from __future__ import annotations

from typing import Any

from app.server.refusal import Refusal, placed_text


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return the document that tells a refusal, its hint and its place included."""
    return {"error": placed_text(refusal)}
