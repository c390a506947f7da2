"""Tests of the size of prompts' pieces beside running answers."""

import pytest

from engine.generation.scheduler import FIRST, LEAST, LONGEST_S, Pace


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 4e-3])
def test_a_piece_takes_about_as_long_as_readers_may_wait(token_s: float) -> None:
    pace = Pace()
    assert pace.n == FIRST
    for _ in range(12):
        pace.note(pace.n, pace.n * token_s)
    assert pace.n * token_s == pytest.approx(LONGEST_S, rel=0.02)


def test_a_slow_machine_still_computes_enough_at_once() -> None:
    pace = Pace()
    pace.note(FIRST, 100.0)
    assert pace.n == LEAST
    for _ in range(20):
        pace.note(LEAST, LEAST * 1e-4)
    assert pace.n > 2000, "what was slow once is not slow for ever"
