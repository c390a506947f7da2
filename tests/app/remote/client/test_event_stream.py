from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.remote.client.connection import MAX_EVENT, StreamError, event_data

STREAM = "\r\n".join(
    [": ping", "data: one", "", "data:two", "data: lines", "", "event: x", "data: three", "", "",
     ":", "data: ü", "", "data: last"]
).encode()  # fmt: skip
EVENTS = ["one", "two\nlines", "three", "ü", "last"]


@given(st.lists(st.integers(0, len(STREAM))), st.sampled_from([b"\r\n", b"\n", b"\r"]))
@settings(max_examples=60, deadline=None)
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int], end: bytes) -> None:
    stream = STREAM.replace(b"\r\n", end)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(places)]
    assert list(event_data(chunks)) == EVENTS


def test_a_line_without_an_end_is_given_up() -> None:
    def endless() -> object:
        yield b"data: "
        for _ in range(2 * MAX_EVENT // 1000):
            yield b"x" * 1000
        raise AssertionError("read on")

    with pytest.raises(StreamError, match="too long"):
        list(event_data(endless()))  # type: ignore[arg-type]


def test_an_event_of_many_lines_is_given_up() -> None:
    line = b"data: " + b"x" * 1000 + b"\n"
    with pytest.raises(StreamError, match="too long"):
        list(event_data([line] * (2 * MAX_EVENT // 1000)))


def test_other_encodings_are_refused() -> None:
    with pytest.raises(StreamError, match="UTF-8"):
        list(event_data(["data: \xfc\n\n".encode("latin-1")]))
