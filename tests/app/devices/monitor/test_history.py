"""The ring of recent values returns what a plain list would return."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.devices.monitor.record import SeriesHistory

entries = st.lists(
    st.tuples(
        st.floats(0.01, 5),
        st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6), max_size=3),
    ),
    max_size=40,
)


@given(entries, st.integers(1, 9), st.floats(0, 100))
def test_a_window_of_the_ring_equals_that_of_a_list(
    steps: list[tuple[float, dict[str, float]]], capacity: int, since: float
) -> None:
    """It also holds after many rounds, and for series that come and go."""
    history = SeriesHistory(capacity)
    plain: list[tuple[float, dict[str, float]]] = []
    now = 0.0
    for pause, values in steps:
        now += pause
        history.append(now, values)
        plain.append((now, values))
    kept = [entry for entry in plain[-capacity:] if entry[0] >= since]
    assert history.times(since) == [time for time, _ in kept]
    for name in history.series:
        expected = [values.get(name, math.nan) for _, values in kept]
        np.testing.assert_array_equal(history.values(name, since), expected)
    if plain:
        np.testing.assert_equal(history.last("a"), plain[-1][1].get("a", math.nan))


def test_an_empty_history_has_nothing() -> None:
    """There are no times and no values, and the last value is NaN."""
    history = SeriesHistory(3)
    assert history.times(0) == []
    assert math.isnan(history.last("a"))
