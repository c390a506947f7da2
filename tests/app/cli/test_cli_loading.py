"""The progress line of a load."""

import pytest

from app.cli import loading
from app.cli.loading import LoadWatch
from engine import LoadProgress


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is shown; the clock advances by half a second between reports."""
    texts: list[str] = []
    times = iter(range(100))
    monkeypatch.setattr(loading, "note_progress", texts.append)
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(times) / 2)
    return texts


def test_the_speed_is_that_of_what_was_read_between_reports(shown: list[str]) -> None:
    """The time before the first report is unknown."""
    watch = LoadWatch()
    for n in (1, 2, 5, 5, 10):
        watch(LoadProgress(n * 10**9, 10**10))
    assert [text.rstrip() for text in shown] == [
        "Loading  10%", "Loading  20%  2.0 GB/s", "Loading  50%  4.0 GB/s",
        "Loading  50%  4.0 GB/s", "Loading 100%  4.5 GB/s",
    ]  # fmt: skip
    assert watch.bytes_per_s == 4.5e9


def test_one_report_has_no_speed(shown: list[str]) -> None:
    watch = LoadWatch()
    watch(LoadProgress(0, 0))
    assert watch.bytes_per_s is None
    assert shown == ["Loading   0%  "]
