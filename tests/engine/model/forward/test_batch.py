"""Which rows of a pass go on where only those are of use whose logits are wanted."""

import pytest
import torch

from engine.model.forward.batch import Batch, PictureRows, Piece

PROMPT, OTHERS = (
    Piece(10, 6, state_slot=2, shift=3),
    (Piece(40, 1, state_slot=1), Piece(7, 1, state_slot=5)),
)


@pytest.mark.parametrize(
    ("first_logit", "first", "n_others", "next_first"),
    [
        (0, PROMPT, 2, 0),
        (1, PROMPT._replace(n_past=11, n=5), 2, 0),
        (5, PROMPT._replace(n_past=15, n=1), 2, 0),
        (6, None, 2, 0),
        (7, None, 1, 0),
        (8, None, 1, 1),  # no logits: the last row stands for a pass of some rows
    ],
)
def test_rows_before_the_first_wanted_one_are_left_out(
    first_logit: int, first: Piece | None, n_others: int, next_first: int
) -> None:
    batch = Batch((PROMPT, *OTHERS), first_logit)
    assert batch.n_wanted == 8 - first_logit
    found = batch.ending()
    kept = OTHERS[len(OTHERS) - n_others :]
    assert found == Batch(kept if first is None else (first, *kept), next_first)
    assert (found is batch) is (first_logit == 0)


def test_of_a_prompt_without_logits_the_last_row_is_left() -> None:
    assert Batch.of_one(100, 20, 20).ending() == Batch((Piece(119, 1),), 1)


def test_rows_of_pictures_are_left_out_unless_one_is_wanted() -> None:
    """Else all rows go on: those of a picture may see each other."""
    shown = PictureRows(1, torch.zeros(4, 8), (11, 15))
    places = tuple([axis, *range(axis, axis + 5)] for axis in (3, 4, 5))
    batch = Batch((PROMPT, OTHERS[0]), 5, pictures=(shown,), places=places)
    first = PROMPT._replace(n_past=15, n=1)
    assert batch.ending() == Batch((first, OTHERS[0]), 0, places=([7], [8], [9]))
    assert batch._replace(first_logit=6).ending() == Batch((OTHERS[0],), 0)
    inside = batch._replace(first_logit=4)
    assert inside.ending() is inside
