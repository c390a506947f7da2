"""Overlap of two computations: order, failures and threads."""

import threading
import time

import pytest

from engine.parallel.batch_overlap import BatchOverlap
from engine.parallel.watchdog import RankActivity


class Steps:
    """Record of the steps of two computations, in order of time."""

    def __init__(self, turns: BatchOverlap) -> None:
        self.turns = turns
        self.order: list[str] = []

    def of(self, name: str, n: int, fails_at: int = -1) -> str:
        for step in range(n):
            self.order.append(f"{name}{step}")
            if step == fails_at:
                raise ZeroDivisionError(name)
            self.turns.switch()
        self.order.append(f"{name}.")
        return name


def test_they_alternate_and_give_both_results() -> None:
    steps = Steps(BatchOverlap())
    assert steps.turns.both(lambda: steps.of("a", 2), lambda: steps.of("b", 2)) == ("a", "b")
    assert steps.order == ["a0", "b0", "a1", "b1", "a.", "b."]


@pytest.mark.parametrize(("n_a", "n_b"), [(3, 1), (1, 3), (0, 2), (2, 0)])
def test_one_that_is_over_is_not_waited_for(n_a: int, n_b: int) -> None:
    steps = Steps(BatchOverlap())
    for _ in range(50):
        assert steps.turns.both(lambda: steps.of("a", n_a), lambda: steps.of("b", n_b)) == (
            "a",
            "b",
        )
    assert steps.order.count("a.") == steps.order.count("b.") == 50


def test_never_both_at_once() -> None:
    turns, inside, most = BatchOverlap(), [0], [0]

    def work() -> None:
        for _ in range(300):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            sum(range(50))
            inside[0] -= 1
            turns.switch()

    turns.both(work, work)
    assert most == [1]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_failure_ends_both_and_is_raised(failing: str) -> None:
    steps = Steps(BatchOverlap())
    for _ in range(20):
        with pytest.raises(ZeroDivisionError, match=failing):
            steps.turns.both(
                lambda: steps.of("a", 5, 1 if failing == "a" else -1),
                lambda: steps.of("b", 5, 1 if failing == "b" else -1),
            )
        assert threading.active_count() < 10
    assert "a." not in steps.order
    assert "b." not in steps.order
    assert steps.turns.both(lambda: 1, lambda: 2) == (1, 2)


def test_the_second_one_is_a_sign_of_life() -> None:
    """The first thread shows no sign of life itself while it waits for the second one."""
    activities: list[RankActivity] = []
    goes_on, has_begun = threading.Event(), threading.Event()

    def rank() -> None:
        activities.append(RankActivity())
        BatchOverlap().both(lambda: None, compute)

    def compute() -> None:
        has_begun.set()
        while not goes_on.is_set():
            sum(range(1000))

    thread = threading.Thread(target=rank)
    thread.start()
    assert has_begun.wait(10)
    activities[0].has_moved()
    time.sleep(0.1)
    assert activities[0].has_moved()
    goes_on.set()
    thread.join()


def test_the_second_thread_ends_with_it() -> None:
    earlier = set(threading.enumerate())  # those of other tests may end meanwhile

    def n_thread() -> int:
        new = set(threading.enumerate()) - earlier
        return sum(thread.name.endswith("second-batch") for thread in new)

    turns = BatchOverlap()
    turns.both(lambda: 1, lambda: 2)
    turns.both(lambda: 1, lambda: 2)
    assert n_thread() == 1
    del turns
    deadline = time.monotonic() + 10
    while n_thread() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert n_thread() == 0
