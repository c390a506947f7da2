"""The turns of a conversation, as chat templates take them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user" or "assistant"."""

    role: str
    content: str
