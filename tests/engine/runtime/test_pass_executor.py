"""Sizes of passes over single tokens, and over an MTP block, that GPUs capture."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.model.forward.batch import Batch, Piece
from engine.runtime.pass_executor import captures_of, make_passes, padded_drafts
from engine.runtime.rank import NO_RANKS, Captures


def rank(captures: bool, elsewhere: Captures = NO_RANKS, *, is_idle: bool = False) -> Any:
    backend = SimpleNamespace(captures=captures, records=not captures)
    return SimpleNamespace(backend=backend, elsewhere=elsewhere, is_idle=is_idle)


@pytest.mark.parametrize(
    ("ranks", "captures", "pads"),
    [
        ([rank(True), rank(True)], (True, True), True),
        ([rank(True), rank(False, is_idle=True)], (True, True), True),
        ([rank(True), rank(False)], (True, False), False),
        ([rank(False), rank(False)], (False, False), True),
        ([rank(True, Captures(some=True, all=False))], (True, False), False),
        ([rank(False, Captures(some=True, all=False))], (True, False), False),
        ([rank(True, Captures(some=True, all=True))], (True, True), True),
    ],
    ids=["GPUs", "idle CPU", "CPU beside", "CPUs", "CPU elsewhere", "GPU elsewhere", "both GPUs"],
)
def test_recurrent_states_are_padded_by_gpus_alone(
    ranks: list[Any], captures: tuple[bool, bool], pads: bool
) -> None:
    """Others compute passes of four as they are, and of three step by step; CPUs record both."""
    assert captures_of(ranks) == captures
    three, four = (
        Batch(tuple(Piece(9, 1, state_slot=seat, batch_index=seat) for seat in range(n)), 0)
        for n in (3, 4)
    )
    nothing: Any = None
    for_states, for_keys = (
        make_passes(nothing, ranks, nothing, nothing, nothing, can_rewind=can_rewind)
        for can_rewind in (False, True)
    )
    assert for_states.may_repeat(three) == pads
    assert for_states.may_repeat(four)
    assert for_keys.may_repeat(three)


def padded(n_read: int, n_guess: int) -> tuple[list[int], list[int], int] | None:
    """Return the tokens, their positions and the first wanted row of a padded pass."""
    pieces = [Piece(10 + k, 1) for k in range(n_read)]
    pieces += [Piece(10 + n_read, 1, batch_index=seat) for seat in range(n_guess)]
    ids = list(range(n_read + n_guess))
    found = padded_drafts(ids, Batch(tuple(pieces), n_read))
    if found is None:
        return None
    return list(found[0]), [piece.n_past for piece in found[1].pieces], found[1].first_logit


def test_passes_are_padded_at_both_ends() -> None:
    """With the first token that is read, and the last one, whose rows are the same again."""
    assert padded(0, 1) == ([0], [10], 0)
    assert padded(0, 3) == ([0, 1, 2, 2], [10] * 4, 0)
    assert padded(1, 1) == ([0, 0, 0, 1], [10, 10, 10, 11], 3)
    assert padded(4, 1) == ([0, 0, 0, 0, 1, 2, 3, 4], [10, 10, 10, 10, 11, 12, 13, 14], 7)
    assert padded(3, 3) == ([0, 0, 1, 2, 3, 4, 5, 5], [10, 10, 11, 12, 13, 13, 13, 13], 4)
    assert padded(13, 3) is None, "four guesses would be more than a pass has rows"
