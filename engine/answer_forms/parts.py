"""Parts of an answer, as they are told while it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PartText:
    """More text of what is thought or said."""

    part: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a function that is called.

    Attributes:
        index: number of the call in its answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of the arguments of a call: all texts of a call together are a JSON object."""

    index: int
    text: str


AnswerPartEvent = PartText | CallBegun | CallText
"""What a parser tells."""
