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
    """More of the arguments of a call: all texts of a whole call together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of the arguments of a call, before any other part.

    Attributes:
        is_whole: whether they are whole; else they broke off, and the call must not be run.
    """

    index: int
    is_whole: bool


AnswerPartEvent = PartText | CallBegun | CallText | CallEnded
"""What a parser tells."""
