"""How chat templates are told whether the model shall think before it answers, and how much."""

from __future__ import annotations

import re

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of templates: the name that Qwen and GLM use, and that of DeepSeek and Granite."""

EFFORT_VARIABLE = "reasoning_effort"
"""Variable of gpt-oss and others, which is "low", "medium" or "high"."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""Marks around a thought in the text of an answer, as most models write them."""

THINKING_MARKS = (
    (THINK_OPEN, THINK_CLOSE),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks around a thought in the chat templates of various models."""

_ASKS = re.compile(
    r"\b(?:enable_thinking\b|thinking is defined\b|(?:if|not|and|or) thinking\b(?!\s*[=(.\[]))"
)


def can_think(template: str) -> bool:
    """Return whether a template's source asks for one of `THINKING_VARIABLES`."""
    return _ASKS.search(template) is not None


def has_effort(template: str) -> bool:
    """Return whether a template's source asks for `EFFORT_VARIABLE`."""
    return EFFORT_VARIABLE in template
