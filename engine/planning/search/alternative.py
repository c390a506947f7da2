"""A split among which a choice is made, with its predicted speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.search.results import Speeds


@dataclass(frozen=True, slots=True)
class Alternative:
    """A split with its predicted speed.

    Attributes:
        params: parameters to load it with.
        speeds: predicted tokens per second of prompt and answer.
        seconds: predicted time of the whole request.
        n_sum: number of all-reduces of a token, over all groups.
        sum_s: time of the slowest of these, in seconds.
        link_s: time of a token that goes to links, in seconds.
        limit: sentence that says what limits decoding.
    """

    params: LoadParams
    speeds: Speeds
    seconds: float
    n_sum: int
    sum_s: float
    link_s: float
    limit: str
