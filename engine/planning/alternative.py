"""One of the splits among which a choice is made, with its predicted speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.planning.search.results import Speeds


@dataclass(frozen=True, slots=True)
class Alternative:
    """A split that was predicted.

    Attributes:
        params: what to load.
        speeds: of the prompt and the answer.
        seconds: of the whole request.
        n_sum: how often the ranks of a group meet for a token, in all.
        sum_s: seconds of one such sum.
        link_s: seconds of a token that go to links.
        limit: what limits generating, in a sentence.
    """

    params: LoadParams
    speeds: Speeds
    seconds: float
    n_sum: int
    sum_s: float
    link_s: float
    limit: str
