"""Chat completions made of the events of the engine, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.server.models import Spell
from app.server.openai.call_arguments import misfit
from app.server.openai.chat_request import ChatRequest
from app.server.openai.choices import ChoicesAnswer
from app.server.openai.logprobs import chat_logprobs
from app.server.openai.usage import REASONS
from app.server.web.responses import Document
from engine import (
    Event,
    Finished,
    TokenLogprob,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)

KINDS = "chat.completion", "chat.completion.chunk"


@dataclass(slots=True)
class BegunCall:
    """A call of a function, as far as it has come."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class ChatChoice:
    """One of the answers to a request, as far as it has come.

    Attributes:
        reason: why it has ended, in OpenAI's words; "" while it has not.
        is_begun: whether its first chunk has been sent.
    """

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, BegunCall] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    is_begun: bool = False

    def note(self, event: Event) -> Document | None:
        """Note an event, and return what a stream tells of it; None for nothing."""
        if isinstance(event, TokenText):
            return self._note_text(event)
        if isinstance(event, ToolCallBegun):
            self.calls[event.index] = BegunCall(event.id, event.name)
            function = {"name": event.name, "arguments": ""}
            begun = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return {"tool_calls": [begun]}
        if isinstance(event, ToolCallText):
            self.calls[event.index].arguments.append(event.text)
            return _more_arguments(event.index, event.text)
        if isinstance(event, ToolCallEnded):
            call = self.calls[event.index]
            call.is_whole = event.is_whole
            if event.is_whole:
                return None
            return _more_arguments(event.index, misfit("".join(call.arguments)))
        if isinstance(event, Finished):  # a stop string may have ended it inside a call
            has_called = event.reason == "stop" and any(one.is_whole for one in self.calls.values())
            self.reason = "tool_calls" if has_called else REASONS[event.reason]
            return {}
        return None

    def _note_text(self, event: TokenText) -> Document | None:
        self.logprobs += event.logprobs
        if event.part == "reasoning":
            self.reasoning.append(event.text)
            return {"reasoning_content": event.text}
        self.content.append(event.text)
        return {"content": event.text} if event.text or event.logprobs else None

    def message(self) -> Document:
        """Return the whole message."""
        content = "".join(self.content)
        found: Document = {"role": "assistant", "content": content or None, "refusal": None}
        if not self.calls:
            found["content"] = content
        else:
            found["tool_calls"] = [
                {
                    "id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self.calls.values()
            ]  # fmt: skip
        if self.reasoning:
            found["reasoning_content"] = "".join(self.reasoning)
        return found


def _more_arguments(index: int, text: str) -> Document:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChatAnswer(ChoicesAnswer):
    """The response to a request, made of the events of its answers.

    Args:
        model: id of the model.
        spell: returns the bytes of a token, where the request asks for logprobs.
    """

    def __init__(self, request: ChatRequest, model: str, spell: Spell | None) -> None:
        super().__init__(request, "chatcmpl", KINDS, model)
        self._spell = spell
        self._choices = [ChatChoice() for _ in range(request.n)]

    def _whole(self) -> list[Document]:
        return [
            {
                "index": index, "message": choice.message(), "finish_reason": choice.reason,
                "logprobs": self._logprobs(choice.logprobs),
            }
            for index, choice in enumerate(self._choices)
        ]  # fmt: skip

    def _note(self, index: int, event: Event) -> Document | None:
        """Note an event, and return what a stream tells of it; None for nothing."""
        self._count.note(event, is_first=index == 0)
        return self._choices[index].note(event)

    def _told(self, index: int, event: Event) -> Iterator[Document]:
        """Yield what chunks tell of an event; before the first, the role."""
        choice = self._choices[index]
        if (delta := self._note(index, event)) is None:
            return
        if not choice.is_begun:
            choice.is_begun = True
            yield self._delta(index, {"role": "assistant", "content": ""}, ())
        logprobs = event.logprobs if isinstance(event, TokenText) else ()
        yield self._delta(index, delta, logprobs, choice.reason or None)

    def _delta(
        self, index: int, delta: Document, logprobs: Sequence[TokenLogprob],
        reason: str | None = None,
    ) -> Document:  # fmt: skip
        return {
            "index": index, "delta": delta, "logprobs": self._logprobs(logprobs),
            "finish_reason": reason,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Document | None:
        if self._spell is None or not tokens:
            return None
        return chat_logprobs(tokens, self._spell)
