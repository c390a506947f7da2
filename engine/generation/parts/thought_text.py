"""Thoughts in the text of an answer, between the marks that most models write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.generation.results import TokenText
from engine.text.thinking import THINK_CLOSE, THINK_OPEN, ThoughtMarker

if TYPE_CHECKING:
    from engine.generation.work import Found, Steps
    from engine.text.messages import ChatMessage


def in_text(steps: Steps, before: ChatMessage | None) -> Steps:
    """Yield the steps of an answer in parts with its thought as text between marks.

    Args:
        before: first part of an answer that goes on, with its thought apart; None for a new one.
    """
    marker = marker_behind(before)
    found: Found | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return
        found = None
        if isinstance(step, TokenText):
            text = marker.written(step.text, is_thought=step.part == "reasoning")
            yield replace(step, text=text, part="content")
        else:
            found = yield step


def marker_behind(before: ChatMessage | None) -> ThoughtMarker:
    """Return what marks the thought of an answer that goes on behind its first part, if any."""
    if before is None:
        return ThoughtMarker()
    has_said = bool(before.content)
    return ThoughtMarker(is_open=bool(before.reasoning) and not has_said, has_said=has_said)


def thought_apart(message: ChatMessage) -> ChatMessage:
    """Return an answer whose thought, which stands in its text between marks, is apart."""
    start = message.content.lstrip()
    if message.reasoning or not start.startswith(THINK_OPEN):
        return message
    thought, _, said = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return replace(message, reasoning=thought.strip(), content=said.lstrip())
