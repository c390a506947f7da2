"""How many guesses are checked: as many as pay, by the times and shares that were measured."""

import random

import pytest

from engine.decoding.drafting.control import (
    LENGTHS,
    MIN_CHECKS,
    N_UNSTEADY,
    PROBE_EVERY,
    PROBE_SHARE,
    DraftControl,
    Proposal,
)
from engine.decoding.drafting.ngram import Kind, kind_of

MODEL = Kind("model", first_share=0.7)
"""Kind of guesses that take time to make."""


def measured(seconds: dict[int, float]) -> DraftControl:
    """Return a control that knows the times of passes by their numbers of rows."""
    control = DraftControl()
    for n_rows, time in seconds.items():
        for _ in range(N_UNSTEADY + 2):
            control.note_pass(n_rows, time)
    return control


CHEAP = {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.3, 16: 1.9}
DEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def chosen(control: DraftControl, kinds: list[Kind], most: int) -> int:
    """Return how many of the guesses that are there are checked."""
    found = control.choose([Proposal(kinds, most)])
    return found[1] if found else 0


def run(
    control: DraftControl, share: float, n: int = 400, alike: int = 4,
    times: dict[int, float] = CHEAP,
) -> list[int]:  # fmt: skip
    """Let guesses be right with a probability, n times; return the lengths that were chosen."""
    drawn, lengths = random.Random(2), []
    for _ in range(n):
        length = chosen(control, [kind_of(alike)], LENGTHS[-1])
        lengths.append(length)
        control.note_pass(1 + length, times[1 + length])
        if length:
            right = next((i for i in range(length) if drawn.random() >= share), length)
            control.note_check(kind_of(alike), length, right)
    return lengths


def test_right_guesses_make_long_ones_and_wrong_ones_none() -> None:
    assert set(run(measured(CHEAP), 1.0)[-50:]) == {LENGTHS[-1]}
    lengths = run(measured(CHEAP), 0.0)
    assert lengths[-PROBE_EVERY:].count(0) == PROBE_EVERY - 1, "and one to see if it is still so"
    middle = run(measured(CHEAP), 0.6)[-50:]
    assert 0 not in middle
    assert max(middle) < LENGTHS[-1]


def test_rows_that_take_as_long_as_tokens_are_not_worth_it() -> None:
    assert sum(map(bool, run(measured(DEAR), 0.9, times=DEAR)[-PROBE_EVERY:])) == 1


@pytest.mark.parametrize("alike", [2, 3, 5, 9])
def test_guesses_that_lose_are_stopped_after_three_passes(alike: int) -> None:
    """However sure they seem, and before it is known how long rows take here."""
    lengths = run(measured({1: 1.0}), 0.0, alike=alike, times=DEAR)
    assert sum(map(bool, lengths[:PROBE_EVERY])) == MIN_CHECKS
    lost = sum(DEAR[1 + length] - DEAR[1] for length in lengths)
    assert lost <= MIN_CHECKS + PROBE_SHARE * sum(DEAR[1 + length] for length in lengths)


def test_guesses_that_are_too_seldom_right_for_their_time_are_stopped() -> None:
    """One third is right, as "5 of 16 guesses", but passes take three times as long."""
    control, times = measured({1: 1.0}), {1: 1.0, 2: 3.0, 4: 5.0}
    n_passes = 0
    for number in range(PROBE_EVERY):
        if length := chosen(control, [kind_of(9)], 3):
            n_passes += 1
            control.note_check(kind_of(9), length, int(number % 3 == 0))
        control.note_pass(1 + length, times[1 + length])
    assert n_passes <= N_UNSTEADY + MIN_CHECKS


def test_more_guesses_are_checked_once_it_is_known_what_fewer_take() -> None:
    lengths = run(measured({1: 1.0}), 1.0, alike=9, n=60)
    assert lengths == sorted(lengths)
    assert [lengths.count(n) for n in LENGTHS[:-1]] == [N_UNSTEADY + 1] * 3
    dear = run(measured({1: 1.0}), 1.0, alike=9, n=60, times={1: 1.0, 2: 1.8, 4: 9.0})
    assert dear[-1] == 1
    assert dear.count(3) == N_UNSTEADY + 1, "until it is known that they take longer"
    assert dear.count(7) == 0


def test_shares_are_measured_apart_by_what_is_alike() -> None:
    control = measured(CHEAP)
    run(control, 0.0, alike=2)
    assert chosen(control, [kind_of(12)], 7) == 7
    assert chosen(control, [kind_of(2)], 7) == 0


def test_it_looks_again_after_a_while_and_finds_what_has_changed() -> None:
    control = measured(CHEAP)
    run(control, 0.0)
    assert set(run(control, 1.0, n=40 * PROBE_EVERY)[-20:]) == {LENGTHS[-1]}


@pytest.mark.parametrize(("n", "expected"), [(1, 7), (2, 3), (4, 3), (8, 1)])
def test_several_answers_share_the_rows_of_a_pass(n: int, expected: int) -> None:
    assert chosen(measured(CHEAP), [kind_of(20)] * n, min(7, 16 // n - 1)) == expected


def test_the_first_passes_of_a_size_do_not_count() -> None:
    control = DraftControl()
    for seconds in (9.0, 9.0, 9.0, 1.0):
        control.note_pass(1, seconds)
    for seconds in (30.0, 30.0, 30.0, 1.2):
        control.note_pass(8, seconds)
    assert chosen(control, [kind_of(20)], 7) == 7


def made(control: DraftControl, share: float, seconds: float, n: int = 300) -> list[int]:
    """Have a model's guesses, each made in so many seconds, right with a probability."""
    drawn, lengths = random.Random(3), []
    for _ in range(n):
        found = control.choose([Proposal([], 0), Proposal([MODEL], 7, MODEL.source, 1)])
        lengths.append(length := found[1] if found else 0)
        control.note_pass(1 + length, CHEAP[1 + length])
        if length:
            control.note_making(MODEL.source, 1, length, seconds * length)
            right = next((i for i in range(length) if drawn.random() >= share), length)
            control.note_check(MODEL, length, right)
    return lengths


def test_a_models_own_time_counts() -> None:
    assert set(made(measured(CHEAP), 1.0, 0.02)[-50:]) == {7}
    assert 0 not in made(measured(CHEAP), 0.7, 0.02)[-50:]
    assert made(measured(CHEAP), 0.7, 0.9)[-PROBE_EVERY:].count(0) == PROBE_EVERY - 1
    assert made(measured(CHEAP), 0.0, 0.02)[-PROBE_EVERY:].count(0) == PROBE_EVERY - 1


@pytest.mark.parametrize("token_s", [0.0, 0.001, 0.01, 0.3])
def test_what_loses_takes_a_small_part_of_the_time(token_s: float) -> None:
    """A source that has to read all that it has not read, before it guesses wrong."""
    control, n_unread, decoded, lost, n_made = measured(CHEAP), 1000, 0.0, 0.0, 0
    losses, n = list[float](), 20 * PROBE_EVERY
    for _ in range(n):
        proposal = Proposal([MODEL], 1, MODEL.source, 1, n_unread)
        before, length = lost, 0
        if control.choose([Proposal([], 0), proposal]):
            if n_unread > 16:  # by pieces, without a guess
                n_read = min(n_unread, 250)
                control.note_reading(MODEL.source, n_read, n_read * token_s)
                lost, n_unread = lost + n_read * token_s, n_unread - n_read
            else:
                control.note_making(MODEL.source, 1, 1, 0.2)
                control.note_check(MODEL, 1, 0)
                lost, length, n_made, n_unread = lost + 0.2, 1, n_made + 1, 0
        control.note_pass(1 + length, CHEAP[1 + length])
        decoded, n_unread = decoded + CHEAP[1 + length], n_unread + 1
        losses.append(lost - before)
    sampled = sum(losses[n // 4 :]) / (decoded * 3 / 4)
    assert sampled <= 1.5 * PROBE_SHARE
    assert n_made >= 2 or token_s == 0.3, "the first ones are made on trust"
    if token_s <= 0.001:
        assert any(losses[-2 * PROBE_EVERY :]), "it may have changed"


def test_what_pays_most_is_checked() -> None:
    """A model's guesses in place of the text's own where these are less often right."""
    control = measured(CHEAP)
    for _ in range(N_UNSTEADY + 1):
        control.note_making(MODEL.source, 1, 1, 0.05)
    for alike, share, expected in ((2, 0.1, MODEL.source), (9, 0.9, "")):
        for _ in range(60):
            control.note_check(kind_of(alike), 10, round(10 * share))
        there = Proposal([kind_of(alike)], 7)
        found = control.choose([there, Proposal([MODEL], 7, MODEL.source, 1)])
        assert found
        assert found[0].maker == expected


def test_choices_that_come_to_nothing_are_rare_where_tokens_take_little_time() -> None:
    choice_s = 30e-6
    for token_s, expected in ((30e-3, 1), (1e-3, 3), (0.3e-3, 10), (1e-6, 32)):
        assert measured({1: token_s}).n_between_choices(1, choice_s) == expected
    assert DraftControl().n_between_choices(1, 1.0) == 1


def test_the_time_of_a_pass_is_known_once_it_was_measured() -> None:
    control = measured({1: 0.5})
    assert control.measured_s(1) == 0.5
    assert control.measured_s(2) is None
