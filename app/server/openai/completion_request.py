"""Requests for completions, as OpenAI documents them, with Tandem's own fields beside."""

from __future__ import annotations

from dataclasses import dataclass

from app.server.openai.chat_request import AnyCompletion
from app.server.openai.sampling import MOST_CHOICES
from app.server.requests.reading import asked

DEFAULT_TOKENS = 16
"""Most tokens of a completion where the request does not say, as in OpenAI's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(AnyCompletion):
    """A request for completions."""

    prompt: str | tuple[str, ...] = asked(
        "The text to go on with, or several.", least=1, most=MOST_CHOICES
    )
    suffix: str = asked("The text behind the gap that the answer fills in.", "")
    echo: bool = asked("Repeat the prompt before the answer.", default=False)
    logprobs: int | None = asked(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    best_of: int | None = asked("Must be n, if anything.", None)
