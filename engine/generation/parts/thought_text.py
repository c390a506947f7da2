"""Thoughts in the text of an answer, between the marks that most models write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.generation.results import TokenText
from engine.text.thinking import THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from engine.generation.work import Found, Steps
    from engine.text.messages import ChatMessage


def in_text(steps: Steps, before: ChatMessage | None) -> Steps:
    """Yield the steps of an answer in parts with its thought as text between marks.

    Args:
        before: first part of an answer that goes on, with its thought apart; None for a new one.
    """
    is_open = before is not None and bool(before.reasoning) and not before.content
    has_said = before is not None and bool(before.content)
    found: Found | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return
        found = None
        if not isinstance(step, TokenText):
            found = yield step
            continue
        text = step.text
        if step.part == "reasoning" and not has_said:
            text = text if is_open else f"{THINK_OPEN}\n{text}"
            is_open = True
        elif text:
            text = f"\n{THINK_CLOSE}\n\n{text}" if is_open else text
            is_open, has_said = False, True
        yield replace(step, text=text, part="content")


def thought_apart(message: ChatMessage) -> ChatMessage:
    """Return an answer whose thought, which stands in its text between marks, is apart."""
    start = message.content.lstrip()
    if message.reasoning or not start.startswith(THINK_OPEN):
        return message
    thought, _, said = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return replace(message, reasoning=thought.strip(), content=said.lstrip())
