"""Settings of sampling and of the end of answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config.fields import number, validate_fields

Overflow = Literal["stop", "shift"]
"""Action when the context is full: end the answer, or drop the oldest messages."""

MOST_TOKENS = 2**31 - 1
"""Number of tokens that no answer reaches."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling and of the end of answers, with llama.cpp's defaults.

    Raises:
        EngineError: a field is out of bounds or of the wrong kind.
    """

    max_tokens: int = number(
        -1,
        "Max tokens",
        "The answer ends after this many tokens. -1 sets no limit but the context.",
        bounds=(-1, 2**31 - 1),
        soft_max=8192,
        step=1,
        kind=int,
        lowest="no limit",
    )
    temperature: float = number(
        0.8,
        "Temperature",
        "Higher is more varied, lower more predictable. 0 always takes the most likely token.",
        bounds=(0.0, 5.0),
        soft_max=2.0,
        step=0.05,
    )
    top_k: int = number(
        40,
        "Top-k",
        "Only this many of the most likely tokens are considered. 0 considers all.",
        bounds=(0, 2**31 - 1),
        soft_max=200,
        step=1,
        kind=int,
    )
    top_p: float = number(
        0.95,
        "Top-p",
        "Only the most likely tokens that together reach this probability are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    min_p: float = number(
        0.05,
        "Min-p",
        "Tokens less likely than this fraction of the most likely one are left out. 0 keeps all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    typical_p: float = number(
        1.0,
        "Typical-p",
        "Only tokens about as surprising as expected, up to this probability, are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    repeat_penalty: float = number(
        1.0,
        "Repeat penalty",
        "Above 1, tokens that occurred recently become less likely. 1 is neutral.",
        bounds=(0.1, 10.0),
        soft_max=2.0,
        step=0.01,
    )
    repeat_last_n: int = number(
        64,
        "Penalty window",
        "How many recent tokens the three penalties look at. -1 is all of them, 0 none.",
        bounds=(-1, 2**31 - 1),
        soft_max=2048,
        step=1,
        kind=int,
        lowest="all",
    )
    frequency_penalty: float = number(
        0.0,
        "Frequency penalty",
        "Subtracted from a token's score for each time it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    presence_penalty: float = number(
        0.0,
        "Presence penalty",
        "Subtracted from a token's score once if it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    seed: int | None = number(
        None,
        "Seed",
        "The same seed gives the same answer again. Without one, each answer uses a new seed.",
        bounds=(0, 2**64 - 1),
        step=1,
        kind=int,
    )
    stop: tuple[str, ...] = field(
        default=(),
        metadata={
            "title": "Stop strings",
            "help": "The answer ends before any of these strings.",
            "kind": tuple,
        },
    )
    ignore_eos: bool = field(
        default=False,
        metadata={
            "title": "Ignore end-of-text",
            "help": "Continues when the model wants to end, up to the maximum of tokens.",
            "kind": bool,
        },
    )
    on_overflow: Overflow = field(
        default="stop",
        metadata={
            "title": "When the context is full",
            "help": "Stop ends the answer; shift drops the oldest messages and continues.",
            "kind": str,
            "choices": ("stop", "shift"),
        },
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of an answer, a large one where there is no limit."""
        return MOST_TOKENS if self.max_tokens < 0 else self.max_tokens
