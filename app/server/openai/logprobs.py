"""Documents of the probabilities of tokens, for chat completions and for completions."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from app.server.models import Spell
from engine import TokenLogprob, TokensScored

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
