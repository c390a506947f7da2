"""Jobs on a thread: the newest request is done, results arrive on the window's thread."""

import threading

import pytest
from pytestqt.qtbot import QtBot

from app.core.background import KeptChild, KeyedJobs, LatestJob
from engine import ChildEnded, EngineError


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


def test_after_a_bug_the_next_work_goes_on(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen, bugs = LatestJob("test-job"), [], []
    monkeypatch.setattr(threading, "excepthook", bugs.append)
    job.done.connect(seen.append)
    job.run(lambda: 1 // 0)
    qtbot.waitUntil(lambda: bool(bugs))
    assert not job.is_busy
    job.run(lambda: 1)
    qtbot.waitUntil(lambda: seen == [1])
    job.close()


def test_a_child_that_was_killed_is_not_started_again() -> None:
    child = KeptChild(["no program of this name"])
    with pytest.raises(OSError, match="no program"):
        child.ask({}, 1 << 30, 1)
    child.kill()
    with pytest.raises(ChildEnded):
        child.ask({}, 1 << 30, 1)


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


def test_jobs_of_one_key_wait_for_the_newest_only_and_keep_the_order(qtbot: QtBot) -> None:
    jobs, begun, go_on = KeyedJobs("test-jobs"), threading.Event(), threading.Event()
    worked, told = [], []

    def slow() -> None:
        begun.set()
        go_on.wait(5)

    jobs.run("a", slow, lambda error: told.append("outdated"))
    assert begun.wait(5)
    for key, name in (("b", "b1"), ("a", "a1"), ("c", "c1"), ("b", "b2"), ("a", "a2")):
        jobs.run(
            key, lambda name=name: worked.append(name), lambda error, name=name: told.append(name)
        )
    go_on.set()
    assert jobs.finish(5)
    jobs.close()
    assert worked == told == ["b2", "a2", "c1"]


def test_a_job_that_fails_is_told_and_asks_for_another(qtbot: QtBot) -> None:
    jobs, told = KeyedJobs("test-jobs"), list[tuple[str, threading.Thread]]()

    def fail() -> None:
        raise OSError(28, "full")

    def retry(error: Exception | None) -> None:
        told.append((str(error), threading.current_thread()))
        jobs.run("a", lambda: None, lambda error: told.append((str(error), main)))

    main = threading.current_thread()
    jobs.run("a", fail, retry)
    qtbot.waitUntil(lambda: bool(told))
    assert jobs.finish(5)
    jobs.close()
    assert told == [("[Errno 28] full", main), ("None", main)]


def test_waiting_for_jobs_has_an_end(qtbot: QtBot) -> None:
    jobs, go_on, told = KeyedJobs("test-jobs"), threading.Event(), []
    jobs.run("a", lambda: bool(go_on.wait(10)) or None, told.append)
    assert not jobs.finish(0.05)
    assert told == []
    go_on.set()
    jobs.close()
    assert told == [None]
    jobs.run("a", lambda: None, told.append)
    jobs.close()
    assert told == [None, None]
