"""Which messages of a conversation may be left out where it is too long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.messages import ChatMessage


def droppable(messages: Sequence[ChatMessage], n_last: int) -> list[range]:
    """Return the indices of each question with its answer, oldest first.

    The results of an answer's calls and what is said behind them belong to it. System prompts and
    the last `n_last` messages are in none, nor is what the last calls answer.
    """
    found, index, end = list[range](), 0, _end(messages, n_last)
    while index < end:
        n = 1
        if messages[index].role != "system":
            n += index + 1 < end and messages[index + 1].role == "assistant"
            while index + n < end and messages[index + n].role == "tool":
                n += 1
                n += index + n < end and messages[index + n].role == "assistant"
            found.append(range(index, index + n))
        index += n
    return found


def _end(messages: Sequence[ChatMessage], n_last: int) -> int:
    """Return the index of the first message that is never dropped."""
    end = len(messages) - n_last
    if all(message.role != "tool" for message in messages[max(0, end) :]):
        return end
    asked = [n for n, message in enumerate(messages[:end]) if message.role == "user"]
    return asked[-1] if asked else 0


def without(
    messages: Sequence[ChatMessage], dropped: Sequence[Collection[int]]
) -> list[ChatMessage]:
    """Return the messages that are at none of some indices."""
    indices = {index for group in dropped for index in group}
    return [message for index, message in enumerate(messages) if index not in indices]


def with_text(message: ChatMessage, text: str) -> ChatMessage:
    """Return a message of the same role with nothing but another text."""
    return replace(message, content=text, reasoning="", tool_calls=(), pictures=())
