"""Tests of a sequence that has all pages to itself, against what was written to each page last."""

from hypothesis import given
from hypothesis import strategies as st

from engine.paging.alone import is_kept, tables_alone
from engine.paging.keys import PAGE
from engine.paging.sight import Sight


@given(
    n_computed=st.integers(1, 12 * PAGE),
    n=st.integers(0, 12 * PAGE),
    window=st.integers(1, 3 * PAGE),
    n_spare=st.integers(0, 3),
    is_chunked=st.booleans(),
)
def test_what_is_kept_was_not_overwritten(
    n_computed: int, n: int, window: int, n_spare: int, is_chunked: bool
) -> None:
    sight = Sight(window, is_chunked)
    n_pages = sight.n_pages(1 << 20, 1) + n_spare
    (table,) = tables_alone([n_pages], n_computed)
    last = {page: index for index, page in enumerate(table)}
    n = min(n, n_computed)
    seen = range(sight.first_seen(n) // PAGE, -(-n // PAGE))
    is_there = all(last[table[index]] == index for index in seen)
    if is_kept(n_pages, sight, n_computed, n):
        assert is_there
    elif sight.first_seen(n) < n:
        assert not is_there


def test_a_whole_cache_keeps_everything() -> None:
    assert tables_alone([3, 2], 3 * PAGE) == ([0, 1, 2], [0, 1, 0])
    assert is_kept(3, Sight(), 3 * PAGE, 1)
