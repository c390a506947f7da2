"""Threads that compute side by side take turns in Python, but never depend on it."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine.kernels import turn
from engine.kernels.meeting import Board

OWNER, N_THREAD = turn.OWNER // 8, turn.N_THREAD // 8
NOBODY = 8  # no thread is called so


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield
    assert turn._words[N_THREAD] == 0
    assert turn._words[OWNER] == 0


def call(board: Board, number: int) -> None:
    """A kernel that lets go of Python's lock and does next to nothing."""
    board.meet(0, number, 0, 0, 0, 0)


def test_a_thread_alone_takes_no_turn() -> None:
    board = Board(1)
    with turn.taking_part():
        call(board, 1)
        assert turn._words[OWNER] == 0


def test_a_thread_has_the_turn_from_kernel_to_kernel() -> None:
    board = Board(1)
    with turn.taking_part(), turn.taking_part():
        call(board, 1)
        mine = turn._words[OWNER]
        assert mine != 0
        call(board, 2)
        assert turn._words[OWNER] == mine
        turn.give_up()
        assert turn._words[OWNER] == 0


def test_a_turn_that_never_ends_is_not_waited_for() -> None:
    board = Board(1)
    with turn.taking_part(), turn.taking_part():
        turn._words[OWNER] = NOBODY
        begun = time.monotonic()
        for number in range(1, 11):
            call(board, number)
        assert time.monotonic() - begun < 5
        assert turn._words[OWNER] == NOBODY, "it is not taken away"


@pytest.mark.parametrize("n_threads", [2, 5])
def test_thousands_of_turns_come_to_an_end(n_threads: int) -> None:
    done: list[int] = []

    def work() -> None:
        board = Board(1)
        with turn.taking_part():
            for number in range(1, 2001):
                call(board, number)
                done.append(number)

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [number for number in range(1, 2001) for _ in threads]


def test_a_failure_ends_the_part() -> None:
    with pytest.raises(ZeroDivisionError), turn.taking_part():
        raise ZeroDivisionError
