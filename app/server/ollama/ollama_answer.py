"""Answers of Ollama's protocol, made of the events of the engine: whole, or line by line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime

from app.server.desk import AnswerEvents
from app.server.openai.call_arguments import read_arguments
from app.server.web.responses import Document, json_bytes
from engine import Event, Finished, TokenText, ToolCallBegun, ToolCallEnded, ToolCallText

REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "length"}
"""Ollama's reasons for the end of an answer."""

NS = 1e9
"""Nanoseconds of a second."""


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line_bytes(document: Document) -> bytes:
    """Return a line of a stream."""
    return json_bytes(document) + b"\n"


@dataclass(slots=True)
class OllamaCallMade:
    """A call of a function, which is told when it is whole."""

    name: str
    arguments: list[str] = field(default_factory=list)

    def documents(self) -> list[Document]:
        """Return the whole call; none where its arguments cannot be read."""
        arguments = read_arguments("".join(self.arguments))
        if arguments is None:
            return []
        return [{"function": {"name": self.name, "arguments": arguments}}]


class OllamaAnswer:
    """The response to a request, made of the events of its answer.

    Args:
        is_chat: whether the answer is a message, and not a text.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._call = OllamaCallMade("")
        self._calls: list[Document] = []
        self._start = time.perf_counter()
        self._end: Finished | None = None

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the whole response."""
        async with aclosing(events):
            async for _, event in events:
                self._note(event)
        text, thought = ("".join(self._texts[part]) for part in ("content", "reasoning"))
        return self._document(text, thought, self._calls) | self._last()

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response line by line."""
        async with aclosing(events):
            async for _, event in events:
                self._note(event)
                if isinstance(event, TokenText) and event.text:
                    is_thought = event.part == "reasoning"
                    text, thought = ("", event.text) if is_thought else (event.text, "")
                    yield line_bytes(self._document(text, thought, []))
                elif isinstance(event, ToolCallEnded) and (calls := self._whole(event)):
                    yield line_bytes(self._document("", "", calls))
        yield line_bytes(self._document("", "", []) | self._last())

    def _note(self, event: Event) -> None:
        if isinstance(event, TokenText):
            self._texts[event.part].append(event.text)
        elif isinstance(event, ToolCallBegun):
            self._call = OllamaCallMade(event.name)
        elif isinstance(event, ToolCallText):
            self._call.arguments.append(event.text)
        elif isinstance(event, ToolCallEnded):
            self._calls += self._whole(event)
        elif isinstance(event, Finished):
            self._end = event

    def _whole(self, event: ToolCallEnded) -> list[Document]:
        """Return the call that has ended; none that was cut off, as its arguments are an object."""
        return self._call.documents() if event.is_whole else []

    def _document(self, text: str, thought: str, calls: list[Document]) -> Document:
        more: Document = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = calls
        head: Document = {"model": self._model, "created_at": now(), "done": False}
        if self._is_chat:
            return head | {"message": {"role": "assistant", "content": text, **more}}
        return head | {"response": text, **more}

    def _last(self) -> Document:
        assert self._end is not None, "the answer has ended"
        usage, timings = self._end.usage, self._end.timings
        return {
            "done": True,
            "done_reason": REASONS[self._end.reason],
            "total_duration": int((time.perf_counter() - self._start) * NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timings.prompt_s * NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timings.decode_s * NS),
        }
