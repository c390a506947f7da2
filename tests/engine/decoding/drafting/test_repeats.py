"""The longest end of a sequence that stands in it twice, and guesses made of it."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.drafting import ngram
from engine.decoding.drafting.ngram import MIN_ALIKE, NgramDrafter, Repeats


def longest_repeated_end(ids: Sequence[int]) -> int:
    """Return the length of the longest end that stands elsewhere as well, by trying all."""
    n = len(ids)
    for length in range(n - 1, 0, -1):
        end = list(ids[n - length :])
        if any(list(ids[at : at + length]) == end for at in range(n - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_longest_repeated_end_is_found_with_its_place(ids: list[int]) -> None:
    seen = Repeats()
    for n, token in enumerate(ids, 1):
        seen.append(token)
        assert (seen.n, seen.n_alike) == (n, longest_repeated_end(ids[:n]))
        if seen.n_alike:
            begin = seen.behind - seen.n_alike
            assert 0 <= begin < n - seen.n_alike, "an earlier place"
            assert ids[begin : seen.behind] == ids[n - seen.n_alike : n]


def test_a_guess_is_what_has_followed() -> None:
    drafter, text = NgramDrafter(), [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    assert drafter.draft(text, 3) == [8, 9, 1]
    assert drafter.n_alike == 3
    assert drafter.draft([*text, 8], 2) == [9, 1], "it reads on"
    assert drafter.draft([*text, 0], 2) == [], "other tokens than were read before"
    assert drafter.draft([3, 4], 2) == []


def test_text_that_repeats_itself_is_expected_to_go_on() -> None:
    assert NgramDrafter().draft([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramDrafter().draft([4, 4, 4], 4) == [4, 4, 4, 4]


def test_one_token_alike_is_too_little() -> None:
    assert MIN_ALIKE == 2
    assert NgramDrafter().draft([1, 2, 9, 1], 3) == []


def test_only_the_last_tokens_of_a_long_text_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_TOKENS", 64)
    drafter, text = NgramDrafter(), list(range(200))
    drawn = random.Random(1)
    for _ in range(300):
        at = drawn.randrange(max(0, len(text) - 20), len(text) - 4)
        text += text[at : at + 4]
        found = drafter.draft(text, 4)
        n, alike = len(text), drafter.n_alike
        assert alike >= 4
        window = text[-64:] if len(text) > 64 else text
        end = text[n - alike :]
        continuations = [
            window[i + alike : i + alike + 1]
            for i in range(len(window) - alike)
            if window[i : i + alike] == end
        ]
        assert [found[0]] in continuations
