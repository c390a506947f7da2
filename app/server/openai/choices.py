"""Responses with several answers, made of the events of the engine, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from app.server.desk import AnswerEvents
from app.server.openai.chat_request import AnyCompletion
from app.server.openai.usage import TokenCount
from app.server.web.responses import Document, event_bytes
from engine import Event

DONE = b"data: [DONE]\n\n"
"""Last event of a stream."""


class ChoicesAnswer(ABC):
    """The response to a request for completions, made of the events of its answers.

    Args:
        prefix: beginning of its id.
        kinds: values of its field `object`, where it is whole and as a chunk of a stream.
        model: id of the model.
    """

    def __init__(
        self, request: AnyCompletion, prefix: str, kinds: tuple[str, str], model: str
    ) -> None:
        self._has_usage = request.wants_usage
        self._count = TokenCount()
        self._kinds = kinds
        self._facts = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the whole response."""
        async with aclosing(events):
            async for index, event in events:
                self._note(index, event)
        head = {**self._facts, "object": self._kinds[0]}
        return {**head, "choices": self._whole(), "usage": self._count.document()}

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as events."""
        head = {**self._facts, "object": self._kinds[1]}
        usage = {"usage": None} if self._has_usage else {}
        async with aclosing(events):
            async for index, event in events:
                for choice in self._told(index, event):
                    yield event_bytes({**head, "choices": [choice], **usage})
        if self._has_usage:
            yield event_bytes({**head, "choices": [], "usage": self._count.document()})
        yield DONE

    @abstractmethod
    def _note(self, index: int, event: Event) -> object:
        """Note an event of the command with an index."""

    @abstractmethod
    def _told(self, index: int, event: Event) -> Iterable[Document]:
        """Note an event, and return what chunks of a stream tell of it."""

    @abstractmethod
    def _whole(self) -> list[Document]:
        """Return the answers when they have ended."""
