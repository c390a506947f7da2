"""Requests for completions, as OpenAI documents them."""

from __future__ import annotations

from dataclasses import dataclass

from app.server.openai.chat_request import AnyCompletion
from app.server.openai.texts.inputs import MOST_IDS, TextInput
from app.server.requests.reading import asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(AnyCompletion):
    """A request for completions."""

    prompt: TextInput = asked(
        "The text to go on with, or several, or the ids of their tokens.", least=1, most=MOST_IDS
    )
    suffix: str = asked("The text behind the gap that the answer fills in.", "")
    echo: bool = asked(
        "Repeat the prompt before the answer, and tell its logprobs, too.", default=False
    )
    logprobs: int | None = asked(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    best_of: int | None = asked("Must be n, if anything.", None)

    @property
    def wants_scores(self) -> bool:
        """Whether the request asks for the log-probabilities of the prompt's tokens."""
        return self.echo and self.logprobs is not None
