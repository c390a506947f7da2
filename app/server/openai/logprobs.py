"""Documents of the probabilities of tokens, for chat completions and for completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from app.server.models import Spell
from engine import TokenLogprob

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
    tokens: Sequence[TokenLogprob], spell: Spell, offset: int
) -> dict[str, Any]:
    """Return the object `logprobs` of a choice of a completion.

    Args:
        offset: number of characters of the text before the first of the tokens.
    """
    texts = [spell(token.id).decode("utf-8", "replace") for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        {spell(other).decode("utf-8", "replace"): _finite(value) for other, value in token.top}
        for token in tokens
    ]
    values = [_finite(token.logprob) for token in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
