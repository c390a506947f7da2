"""Garbage is collected only while no device can be harmed by it."""

import gc
import threading

import pytest

from engine.hardware.garbage import collect_garbage, hold_garbage


class Loop:
    """An object that only the garbage collector frees."""

    n_freed = 0

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        Loop.n_freed += 1


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    gc.collect()
    Loop.n_freed = 0


def test_nothing_is_collected_while_somebody_holds_it() -> None:
    assert gc.isenabled()
    with hold_garbage():
        with hold_garbage():
            Loop()
            assert not gc.isenabled()
        assert not gc.isenabled(), "the first still holds"
        assert not collect_garbage()
        assert Loop.n_freed == 0
    assert gc.isenabled()
    assert collect_garbage()
    assert Loop.n_freed == 1


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with hold_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the window collects by itself"
    finally:
        gc.enable()


def test_a_collection_ends_before_others_go_on() -> None:
    """A thread that wants to hold garbage back waits until a running collection is done."""
    steps: list[str] = []
    is_collecting, may_end = threading.Event(), threading.Event()

    def collecting(phase: str, _info: object) -> None:
        if phase == "start":
            is_collecting.set()
            may_end.wait(10)
            steps.append("collected")

    def collect() -> None:
        gc.callbacks.append(collecting)
        collect_garbage()
        gc.callbacks.remove(collecting)

    def hold() -> None:
        with hold_garbage():
            steps.append("held")

    threads = [threading.Thread(target=collect), threading.Thread(target=hold)]
    threads[0].start()
    assert is_collecting.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert steps == []
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert steps == ["collected", "held"]


def test_a_finalizer_may_hold_garbage() -> None:
    """A model that is collected closes, which takes turns with other ranks."""
    held: list[bool] = []

    class Closing(Loop):
        """An object that holds garbage while it is freed."""

        def __del__(self) -> None:
            with hold_garbage():
                held.append(gc.isenabled())

    Closing()
    collect_garbage()
    assert held == [False]
    assert gc.isenabled()
