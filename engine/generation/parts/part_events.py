"""Turns the text of an answer into events of its parts: thought, content and calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.generation.results import (
    Finished,
    GenerationEvent,
    TokenLogprob,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from engine.text.tool_calls.parts import AnswerPartEvent, CallBegun, CallText, PartText

if TYPE_CHECKING:
    from engine.generation.work import Found, Steps
    from engine.text.tool_calls.parser import AnswerParser


def in_parts(steps: Steps, parser: AnswerParser, told: str = "") -> Steps:
    """Yield the steps of an answer with its text in parts; each token is told once as before.

    Args:
        told: text that the parser holds back, but that an earlier part of the answer has told.
    """
    events = _PartEvents(parser, told)
    found: Found | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return
        found = None
        if isinstance(step, TokenText):
            yield from events.of(step)
        elif isinstance(step, Finished):
            yield from events.end(is_cut=step.reason != "stop")
            yield step
        else:
            found = yield step


class _PartEvents:
    """Events of the parts of one answer, and the tokens that no event has told yet."""

    def __init__(self, parser: AnswerParser, told: str) -> None:
        self._parser = parser
        self._held = told
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def of(self, text: TokenText) -> Iterator[GenerationEvent]:
        """Yield what more text makes known."""
        self._ids += text.ids
        self._logprobs += text.logprobs
        yield from self._told(self._parser.feed(text.text))

    def end(self, *, is_cut: bool) -> Iterator[GenerationEvent]:
        """Yield what was held back; see `AnswerParser.end`."""
        yield from self._told(self._parser.end(is_cut=is_cut))
        if self._ids:
            yield self._text(PartText("content", ""))

    def _told(self, parts: Sequence[AnswerPartEvent]) -> Iterator[GenerationEvent]:
        if parts and not any(isinstance(part, PartText) for part in parts) and self._ids:
            yield self._text(PartText("content", ""))
        for part in parts:
            if isinstance(part, PartText):
                yield self._text(self._untold(part))
            elif isinstance(part, CallBegun):
                yield ToolCallBegun(part.index, new_call_id(), part.name)
            elif isinstance(part, CallText):
                yield ToolCallText(part.index, part.text)
            else:
                yield ToolCallEnded(part.index, part.is_whole)

    def _untold(self, part: PartText) -> PartText:
        """Return a text without what has been told of it before."""
        n = 0
        while n < min(len(self._held), len(part.text)) and self._held[n] == part.text[n]:
            n += 1
        self._held = self._held[n:] if n == len(part.text) else ""
        return PartText(part.part, part.text[n:])

    def _text(self, part: PartText) -> TokenText:
        event = TokenText(part.text, tuple(self._ids), part.part, tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return event


def new_call_id() -> str:
    """Return a name for a call: nine letters and digits, as the strictest templates want them."""
    return secrets.token_hex(5)[:9]
