"""Jobs on a thread: the newest request is done, results arrive on the window's thread."""

import threading

from pytestqt.qtbot import QtBot

from app.background import LatestJob
from engine import EngineError


def test_results_arrive_on_the_own_thread(qtbot: QtBot) -> None:
    job, seen = LatestJob("test-job"), []
    job.done.connect(lambda result: seen.append((result, threading.current_thread())))
    job.run(lambda: threading.current_thread().name)
    qtbot.waitUntil(lambda: bool(seen))
    assert seen == [("test-job", threading.main_thread())]
    job.close()


def test_of_those_that_wait_only_the_newest_is_done(qtbot: QtBot) -> None:
    job, seen, begun, go_on = LatestJob("test-job"), [], threading.Event(), threading.Event()
    job.done.connect(seen.append)

    def slow() -> str:
        begun.set()
        go_on.wait(5)
        return "first"

    job.run(slow)
    assert begun.wait(5)
    for number in range(10):
        job.run(lambda n=number: n)
    go_on.set()
    qtbot.waitUntil(lambda: len(seen) == 2)
    job.close()
    assert seen == ["first", 9]


def test_an_engine_error_is_told_and_the_next_work_goes_on(qtbot: QtBot) -> None:
    job, seen, failed = LatestJob("test-job"), [], []
    job.done.connect(seen.append)
    job.failed.connect(failed.append)

    def fail() -> None:
        raise EngineError("No such thing.")

    job.run(fail)
    qtbot.waitUntil(lambda: bool(failed))
    assert str(failed[0]).startswith("No such thing.")
    job.run(lambda: 1)
    qtbot.waitUntil(lambda: seen == [1])
    job.close()


def test_what_was_dropped_is_never_told(qtbot: QtBot) -> None:
    """Not even a job that is done and whose result is on the way."""
    job, seen, done = LatestJob("test-job"), [], threading.Event()
    job.done.connect(seen.append)
    job.run(done.set)
    assert done.wait(5)
    job.close()
    job.run(lambda: "new")
    qtbot.waitUntil(lambda: bool(seen))
    assert seen == ["new"]
    job.close()
