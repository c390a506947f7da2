"""Chat completions built from engine events, complete or in chunks, and code that others share."""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from app.server.context import AnswerEvents
from app.server.models import Spell
from app.server.openai.conversation import AnyCompletion, ChatRequest
from app.server.web.responses import Document, event_bytes
from engine import (
    AnswerBlocks,
    Event,
    Finished,
    TokenLogprob,
    TokensScored,
    TokenText,
    ToolCallEnded,
)

REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "length"}
"""OpenAI's finish reasons by the engine's; an answer that timed out counts as "length"."""


@dataclass(slots=True)
class TokenCount:
    """Token usage for a request, over all its answers.

    Attributes:
        n_prompt, n_cached: prompt tokens, and how many were cached; a prompt with several answers
            counts once.
        n_answer, n_thought: tokens in the answers, and how many are reasoning.
        n_drafted, n_accepted: draft tokens, and how many were accepted.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_answer: int = 0
    n_thought: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def note(self, event: object, *, is_first: bool) -> None:
        """Count an event; `is_first` tells whether its answer is the first for its prompt."""
        if isinstance(event, TokenText) and event.part == "reasoning":
            self.n_thought += len(event.ids)
        elif isinstance(event, Finished):
            self.n_answer += event.usage.completion_tokens
            self.n_drafted += event.usage.n_drafted
            self.n_accepted += event.usage.n_accepted
            if is_first:
                self.n_prompt += event.usage.prompt_tokens
                self.n_cached += event.usage.cached_tokens

    def document(self) -> dict[str, Any]:
        """Return the `usage` object for a completion."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_answer,
            "total_tokens": self.n_prompt + self.n_answer,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.n_thought,
                "accepted_prediction_tokens": self.n_accepted,
                "rejected_prediction_tokens": self.n_drafted - self.n_accepted,
            },
        }

    def response_document(self) -> dict[str, Any]:
        """Return the `usage` object for the Responses protocol."""
        return {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": self.n_cached, "cache_write_tokens": 0},
            "output_tokens": self.n_answer,
            "output_tokens_details": {"reasoning_tokens": self.n_thought},
            "total_tokens": self.n_prompt + self.n_answer,
        }


CLOSINGS = {"{": "}", "[": "]"}


def read_arguments(text: str) -> Document | None:
    """Parse the arguments of a call; return None if the text is not a JSON object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def misfit(arguments: str) -> str:
    """Return a suffix that makes even lenient clients reject truncated arguments.

    LangChain closes open brackets in streamed arguments and then runs the truncated call, e.g.
    `delete_path("home/anna")` instead of a longer path. It rejects mismatched brackets.
    """
    opened: list[str] = []
    is_quoted = is_escaped = False
    for char in arguments:
        if is_quoted:
            is_quoted = char != '"' or is_escaped
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_quoted = True
        elif char in CLOSINGS:
            opened.append(char)
        elif char in CLOSINGS.values() and opened:
            opened.pop()
    quote = ("\\" if is_escaped else "") + '"' if is_quoted else ""
    return quote + ("]" if opened[-1:] == ["{"] else "}")


DONE = b"data: [DONE]\n\n"


class ChoicesAnswer(ABC):
    """The response to a completion request, built from the events of its answers.

    Args:
        prefix: prefix of its id.
        kinds: values of its field `object`, in a complete response and in a chunk.
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
        """Return the complete response."""
        async with aclosing(events):
            async for index, event in events:
                self._note(index, event)
        head = {**self._facts, "object": self._kinds[0]}
        return {**head, "choices": self._whole(), "usage": self._count.document()}

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""
        head = {**self._facts, "object": self._kinds[1]}
        usage = {"usage": None} if self._has_usage else {}
        async with aclosing(events):
            async for index, event in events:
                for choice in self._events(index, event):
                    yield event_bytes({**head, "choices": [choice], **usage})
        if self._has_usage:
            yield event_bytes({**head, "choices": [], "usage": self._count.document()})
        yield DONE

    @abstractmethod
    def _note(self, index: int, event: Event) -> object:
        """Process an answer's event."""

    @abstractmethod
    def _events(self, index: int, event: Event) -> Iterable[Document]:
        """Process an answer's event and return the choices to stream for it."""

    @abstractmethod
    def _whole(self) -> list[Document]:
        """Return the complete choices, after all answers have finished."""


IMPOSSIBLE = -9999.0  # replaces log(0), which JSON cannot represent


def chat_logprobs(tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
    """Return the `logprobs` object for a chat completion's choice."""
    content = [
        _entry(token.id, token.logprob, spell)
        | {"top_logprobs": [_entry(other, value, spell) for other, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, value: float, spell: Spell) -> dict[str, Any]:
    piece = spell(token)
    text = piece.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(value), "bytes": [*piece]}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else IMPOSSIBLE


def completion_logprobs(
    tokens: Sequence[TokenLogprob], spell: Spell, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return the `logprobs` object for a completion's choice; `offsets` are those of `tokens`."""
    return {
        "tokens": [spell(token.id).decode("utf-8", "replace") for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, spell) for token in tokens],
        "text_offset": [*offsets],
    }


def prompt_logprobs(scored: TokensScored, text: str, spell: Spell) -> dict[str, Any]:
    """Return the `logprobs` object for a prompt; its first token has no logprob.

    Args:
        text: text of the prompt. Offsets do not count text that the tokens add before it, such as
            BOS or a leading space.
    """
    pieces = [spell(token) for token in scored.ids]
    whole = b"".join(pieces).decode("utf-8", "replace")
    n_before = len(whole) - len(text) if whole.endswith(text) else 0
    places = [min(max(0, at - n_before), len(text)) for at in TokenPlaces().of(pieces)]
    logprobs = completion_logprobs(scored.logprobs, spell, places)
    return logprobs | {
        "tokens": [piece.decode("utf-8", "replace") for piece in pieces],
        "token_logprobs": [None, *logprobs["token_logprobs"]],
        "top_logprobs": [None, *logprobs["top_logprobs"]],
    }


def joined_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate two completions' `logprobs` objects."""
    return {name: [*first[name], *second[name]] for name in first}


def _top(token: TokenLogprob, spell: Spell) -> dict[str, float]:
    """Return logprobs by text; if several tokens have the same text, the most likely one's."""
    top: dict[str, float] = {}
    for other, value in (*token.top, (token.id, token.logprob)):
        top.setdefault(spell(other).decode("utf-8", "replace"), _finite(value))
    return top


class TokenPlaces:
    """Character offsets of successive tokens in a text; the first token is at `start`."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for piece in pieces:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(piece))
        return offsets


KINDS = "chat.completion", "chat.completion.chunk"


@dataclass(slots=True)
class ChatChoice:
    """One of the answers to a request.

    Attributes:
        reason: finish reason, or "".
        is_begun: whether its first chunk has been sent.
    """

    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)
    reason: str = ""
    is_begun: bool = False

    def note(self, event: Event) -> Document | None:
        """Process an event and return its delta for a stream, if any."""
        delta: Document | None = None
        for change, block, text in self.blocks.add(event):
            if block.kind == "thought":
                delta = {"reasoning_content": text} if change == "grown" else delta
            elif block.kind == "text":
                delta = {"content": text} if change == "grown" else delta
            elif change == "begun":
                function = {"name": block.name, "arguments": ""}
                begun = {"id": block.id, "type": "function", "function": function}
                delta = {"tool_calls": [{"index": block.index, **begun}]}
            elif change == "grown":
                delta = _more_arguments(block.index, text)
            elif not block.is_whole and isinstance(event, ToolCallEnded):
                delta = _more_arguments(block.index, misfit(block.text))
        if isinstance(event, Finished):  # a stop string may have cut it off inside a call
            has_called = event.reason == "stop" and any(one.is_whole for one in self.blocks.calls)
            self.reason = "tool_calls" if has_called else REASONS[event.reason]
            return {}
        if isinstance(event, TokenText) and not event.text:
            if event.part == "reasoning":
                return {"reasoning_content": ""}
            return {"content": ""} if event.logprobs else None
        return delta

    def message(self) -> Document:
        """Return the complete message."""
        content, thought = self.blocks.text_of("text"), self.blocks.text_of("thought")
        message: Document = {"role": "assistant", "content": content or None, "refusal": None}
        calls = [
            {
                "id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in self.blocks.calls
        ]  # fmt: skip
        if not calls:
            message["content"] = content
        else:
            message["tool_calls"] = calls
        if thought:
            message["reasoning_content"] = thought
        return message


def _more_arguments(index: int, text: str) -> Document:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChatAnswer(ChoicesAnswer):
    """The response to a chat completion request.

    Args:
        spell: returns a token's bytes; None if no logprobs are requested.
    """

    def __init__(self, request: ChatRequest, model: str, spell: Spell | None) -> None:
        super().__init__(request, "chatcmpl", KINDS, model)
        self._spell = spell
        self._choices = [ChatChoice() for _ in range(request.n)]

    def _whole(self) -> list[Document]:
        return [
            {
                "index": index, "message": choice.message(), "finish_reason": choice.reason,
                "logprobs": self._logprobs(choice.blocks.logprobs),
            }
            for index, choice in enumerate(self._choices)
        ]  # fmt: skip

    def _note(self, index: int, event: Event) -> Document | None:
        self._count.note(event, is_first=index == 0)
        return self._choices[index].note(event)

    def _events(self, index: int, event: Event) -> Iterator[Document]:
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
