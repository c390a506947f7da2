"""The numbers of tokens of a request, and why an answer has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import Finished, TokenText

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
