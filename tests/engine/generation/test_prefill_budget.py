"""Tests of the size of prompts' pieces beside running answers."""

import pytest

from engine.generation.scheduler import FIRST_PIECE, MAX_PASS_S, MIN_PIECE, PrefillBudget


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 4e-3])
def test_a_piece_takes_about_as_long_as_readers_may_wait(token_s: float) -> None:
    budget = PrefillBudget()
    assert budget.n == FIRST_PIECE
    for _ in range(12):
        budget.note(budget.n, budget.n * token_s)
    assert budget.n * token_s == pytest.approx(MAX_PASS_S, rel=0.02)


def test_a_slow_machine_still_computes_enough_at_once() -> None:
    budget = PrefillBudget()
    budget.note(FIRST_PIECE, 100.0)
    assert budget.n == MIN_PIECE
    for _ in range(20):
        budget.note(MIN_PIECE, MIN_PIECE * 1e-4)
    assert budget.n > 2000, "what was slow once is not slow for ever"
