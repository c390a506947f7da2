"""Recurrent states are found at the lengths at which they were kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generation.kv_cache import Checkpoints
from engine.model.forward.pages import PAGE


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 10_000 + i for i in range(n)]


def kept_at(*lengths: int, most_bytes: int = 100) -> Checkpoints[int]:
    made = Checkpoints[int](most_bytes)
    for n in lengths:
        assert made.keep(tokens(n), n, 1)
    return made


@given(st.sets(st.integers(1, 4 * PAGE)), st.integers(0, 4 * PAGE), st.integers(0, 4 * PAGE))
def test_what_begins_alike_is_found(lengths: set[int], n: int, fork: int) -> None:
    kept = kept_at(*lengths, most_bytes=2000)
    ids = [*tokens(fork), *tokens(4 * PAGE, 1)][:n]
    found = kept.lengths(ids)
    assert found == sorted((at for at in lengths if at <= min(n, fork)), reverse=True)
    assert [kept.state(ids[:at]) for at in found] == found


def test_what_was_used_longest_ago_goes_first() -> None:
    kept = kept_at(10, 20, 300, most_bytes=3)
    assert kept.state(tokens(10)) == 10
    kept.keep(tokens(400), 400, 1)
    assert kept.lengths(tokens(400)) == [400, 300, 10]
    kept.keep(tokens(500), 500, 3)
    assert kept.lengths(tokens(500)) == [500]
    assert (len(kept), kept.n_bytes) == (1, 3)


def test_a_state_replaces_that_of_the_same_tokens() -> None:
    kept = kept_at(10, 10, 10, most_bytes=1)
    assert (len(kept), kept.n_bytes) == (1, 1)


def test_what_is_too_large_is_not_kept() -> None:
    kept = kept_at(10, most_bytes=2)
    assert not kept.keep(tokens(20), 20, 3)
    assert kept.lengths(tokens(20)) == [10]
    assert not kept.keep(tokens(10), 10, 3)
    assert (kept.lengths(tokens(20)), kept.n_bytes) == ([], 0)


def test_all_can_be_dropped() -> None:
    kept = kept_at(10, 300)
    kept.clear()
    assert (kept.lengths(tokens(300)), len(kept), kept.n_bytes) == ([], 0, 0)
    with pytest.raises(KeyError):
        kept.state(tokens(10))
