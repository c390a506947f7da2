"""What the list of chats shows of one, without its messages."""

from __future__ import annotations

from dataclasses import dataclass

from app.chat.conversation import Conversation


@dataclass(frozen=True, slots=True)
class ChatSummary:
    """A chat as one line of the list.

    Attributes:
        updated: when it was last changed, in seconds since the epoch.
    """

    id: str
    title: str
    updated: float

    @classmethod
    def of(cls, chat: Conversation) -> ChatSummary:
        return cls(chat.id, chat.title, chat.updated)
