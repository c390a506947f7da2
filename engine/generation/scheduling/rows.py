"""The rows of a pass: its tokens, where they belong, and what is sampled behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from engine.generation.work import Follow
from engine.model.forward.batch import Piece

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import SamplingWish
    from engine.generation.scheduling.requests import Request


def pass_rows(
    requests: Sequence[Request], guesses: Mapping[Request, Sequence[int]], n_first: int
) -> tuple[list[int], tuple[Piece, ...]]:
    """Return the tokens of a pass and where they belong.

    Args:
        guesses: the tokens to compute behind the next ones of answers.
        n_first: number of tokens of the first answer.
    """
    ids, pieces = list[int](), list[Piece]()
    for request in requests:
        place, guess = request.place, guesses.get(request, ())
        assert place is not None
        n = 1 if pieces else n_first
        at, tables, shift = place.n, place.tables, request.pictures.shift(place.n)
        slots = [place.slot, place.slot, *(place.ahead or [place.slot] * len(guess))]
        for i, (source, goal) in enumerate(pairwise(slots)):
            pieces.append(Piece(at + i, 1 if i else n, tables, goal, place.seat, source, shift))
        ids += [*request.wanted[at : at + n], *guess]
    return ids, tuple(pieces)


def sampling_wishes(
    requests: Sequence[Request], guesses: Mapping[Request, Sequence[int]]
) -> list[SamplingWish | None]:
    """Return for each row with logits how its token may be sampled where they are.

    There is None for a row whose logits are wanted, as for all rows of an answer with guesses.
    """
    wishes: list[SamplingWish | None] = []
    for request in requests:
        guess = guesses.get(request, ())
        wish = request.work.wish if isinstance(request.work, Follow) and not guess else None
        wishes += [wish] + [None] * len(guess)
    return wishes
