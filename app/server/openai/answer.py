"""Chat completions made of the events of the engine, whole or as a stream of chunks."""

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
"""OpenAI's reasons for the end of an answer; what was cut off after a time has a length, too."""


@dataclass(slots=True)
class TokenCount:
    """Numbers of tokens of the answers to a request.

    Attributes:
        n_prompt: number of tokens of the prompts; several answers to one prompt count it once.
        n_cached: number of these that were cached.
        n_answer: number of tokens of the answers.
        n_thought: number of these that were thoughts.
        n_drafted: number of tokens that were guessed and checked.
        n_accepted: number of these guesses that were right.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_answer: int = 0
    n_thought: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def note(self, event: object, *, is_first: bool) -> None:
        """Note an event of an answer.

        Args:
            is_first: whether the answer is the first one to its prompt.
        """
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
        """Return the object `usage` of a completion."""
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
        """Return the same with the names of the Responses protocol."""
        return {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": self.n_cached, "cache_write_tokens": 0},
            "output_tokens": self.n_answer,
            "output_tokens_details": {"reasoning_tokens": self.n_thought},
            "total_tokens": self.n_prompt + self.n_answer,
        }


CLOSINGS = {"{": "}", "[": "]"}


def read_arguments(text: str) -> Document | None:
    """Return the arguments of a call; None if the text is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def misfit(arguments: str) -> str:
    """Return text that makes truncated arguments invalid for lenient clients, too.

    LangChain closes open brackets of streamed arguments, and then runs the call with what has
    arrived: `delete_path("home/anna")` instead of a longer path. It gives up at a bracket that does
    not match.
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
                for choice in self._events(index, event):
                    yield event_bytes({**head, "choices": [choice], **usage})
        if self._has_usage:
            yield event_bytes({**head, "choices": [], "usage": self._count.document()})
        yield DONE

    @abstractmethod
    def _note(self, index: int, event: Event) -> object:
        """Note an event of the command with an index."""

    @abstractmethod
    def _events(self, index: int, event: Event) -> Iterable[Document]:
        """Note an event, and return what chunks of a stream tell of it."""

    @abstractmethod
    def _whole(self) -> list[Document]:
        """Return the answers when they have ended."""


IMPOSSIBLE = -9999.0
"""What stands for the logarithm of 0, which JSON cannot have."""


def chat_logprobs(tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
    """Return the object `logprobs` of a choice of a chat completion."""
    content = [
        _entry(token.id, token.logprob, spell)
        | {"top_logprobs": [_entry(other, value, spell) for other, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, value: float, spell: Spell) -> dict[str, Any]:
    spelt = spell(token)
    text = spelt.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(value), "bytes": [*spelt]}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else IMPOSSIBLE


def completion_logprobs(
    tokens: Sequence[TokenLogprob], spell: Spell, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return the object `logprobs` of a choice of a completion.

    Args:
        offsets: place in the text of each token, see `TokenPlaces`.
    """
    return {
        "tokens": [spell(token.id).decode("utf-8", "replace") for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, spell) for token in tokens],
        "text_offset": [*offsets],
    }


def prompt_logprobs(scored: TokensScored, text: str, spell: Spell) -> dict[str, Any]:
    """Return the object `logprobs` of a prompt, whose first token has nothing before it.

    Args:
        text: text of the prompt. Where its tokens spell more before it, such as BOS or the space
            with which some models begin, that has no place of its own.
    """
    spelt = [spell(token) for token in scored.ids]
    whole = b"".join(spelt).decode("utf-8", "replace")
    n_before = len(whole) - len(text) if whole.endswith(text) else 0
    places = [min(max(0, at - n_before), len(text)) for at in TokenPlaces().of(spelt)]
    found = completion_logprobs(scored.logprobs, spell, places)
    return found | {
        "tokens": [piece.decode("utf-8", "replace") for piece in spelt],
        "token_logprobs": [None, *found["token_logprobs"]],
        "top_logprobs": [None, *found["top_logprobs"]],
    }


def joined_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the probabilities of two texts of a completion, one behind the other, as one."""
    return {name: [*first[name], *second[name]] for name in first}


def _top(token: TokenLogprob, spell: Spell) -> dict[str, float]:
    """Return the likeliest tokens of a place and the token itself.

    Where several tokens are spelt alike, such as parts of characters, the likeliest one counts.
    """
    found: dict[str, float] = {}
    for other, value in (*token.top, (token.id, token.logprob)):
        found.setdefault(spell(other).decode("utf-8", "replace"), _finite(value))
    return found


class TokenPlaces:
    """The places of tokens in a text, in characters, as the tokens come.

    Args:
        start: number of characters before the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return the number of whole characters before each of the next pieces of the text."""
        found = []
        for piece in pieces:
            found.append(self._at)
            self._at += len(self._decoder.decode(piece))
        return found


KINDS = "chat.completion", "chat.completion.chunk"


@dataclass(slots=True)
class ChatChoice:
    """One of the answers to a request, as far as it has come.

    Attributes:
        reason: why it has ended, in OpenAI's words; "" while it has not.
        is_begun: whether its first chunk has been sent.
    """

    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)
    reason: str = ""
    is_begun: bool = False

    def note(self, event: Event) -> Document | None:
        """Note an event, and return what a stream tells of it; None for nothing."""
        found: Document | None = None
        for change, block, text in self.blocks.add(event):
            if block.kind == "thought":
                found = {"reasoning_content": text} if change == "grown" else found
            elif block.kind == "text":
                found = {"content": text} if change == "grown" else found
            elif change == "begun":
                function = {"name": block.name, "arguments": ""}
                begun = {"id": block.id, "type": "function", "function": function}
                found = {"tool_calls": [{"index": block.index, **begun}]}
            elif change == "grown":
                found = _more_arguments(block.index, text)
            elif not block.is_whole and isinstance(event, ToolCallEnded):
                found = _more_arguments(block.index, misfit(block.text))
        if isinstance(event, Finished):  # a stop string may have ended it inside a call
            has_called = event.reason == "stop" and any(one.is_whole for one in self.blocks.calls)
            self.reason = "tool_calls" if has_called else REASONS[event.reason]
            return {}
        if isinstance(event, TokenText) and not event.text:
            if event.part == "reasoning":
                return {"reasoning_content": ""}
            return {"content": ""} if event.logprobs else None
        return found

    def message(self) -> Document:
        """Return the whole message."""
        content, thought = self.blocks.text_of("text"), self.blocks.text_of("thought")
        found: Document = {"role": "assistant", "content": content or None, "refusal": None}
        calls = [
            {
                "id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in self.blocks.calls
        ]  # fmt: skip
        if not calls:
            found["content"] = content
        else:
            found["tool_calls"] = calls
        if thought:
            found["reasoning_content"] = thought
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
                "logprobs": self._logprobs(choice.blocks.logprobs),
            }
            for index, choice in enumerate(self._choices)
        ]  # fmt: skip

    def _note(self, index: int, event: Event) -> Document | None:
        """Note an event, and return what a stream tells of it; None for nothing."""
        self._count.note(event, is_first=index == 0)
        return self._choices[index].note(event)

    def _events(self, index: int, event: Event) -> Iterator[Document]:
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
