"""Characters that act on terminals and labels are found, whatever is around them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.util.sanitize import (
    MAX_ERROR,
    MAX_HINT,
    REPLACEMENT,
    error_line,
    json_escaped,
    one_line,
    printable,
)
from tests.helpers.acting_texts import ACTING, ESCAPES, acting


@pytest.mark.parametrize("text", ESCAPES)
def test_nothing_acts_and_the_words_stay(text: str) -> None:
    shown = printable(text)
    assert not acting(shown)
    assert REPLACEMENT in shown or "\r" in text
    kept = [c for c in text if c not in ACTING]
    assert [c for c in shown if c != REPLACEMENT] == kept


@given(st.text(st.sampled_from([*sorted(ACTING), "a", "[", "\n", "\t", "ж", "🙂", "ש", "\u200d"])))
def test_a_text_in_pieces_is_shown_as_the_whole(text: str) -> None:
    assert "".join(printable(piece) for piece in text) == printable(text)
    assert not acting(printable(text))
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    "text",
    [
        "naïve\tcafé\n",
        "日本語",
        "שלום\u200f",
        "نص\u200e",
        "👩\u200d👩\u200d👧",
        "e\u0301",
        "\u00a0",
    ],
)
def test_usual_text_of_all_scripts_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\u2028b", "a\x0bb", "a\x85b", " a \t b "])
def test_a_line_has_no_breaks(text: str) -> None:
    assert one_line(text) == "a b"


def test_long_texts_are_cut() -> None:
    assert one_line("x" * 10, 10) == "x" * 10
    assert one_line("a" * 8 + "z" * 3, 10) == "aaaaaa…zzz"
    assert one_line("a b" * 10_000_000, 10) == "a ba b…a b"
    assert one_line(f"a{' ' * 1_000_000}b", 10) == "a … b"


@pytest.mark.parametrize("n_message", [0, 10, 499, 500, 501, 10_000_000])
@pytest.mark.parametrize("n_hint", [0, 10, 250, 10_000])
def test_an_error_is_a_short_line_and_keeps_its_hint(n_message: int, n_hint: int) -> None:
    line = error_line("m" * n_message, "h" * n_hint)
    assert len(line) <= MAX_ERROR
    assert line.count("h") >= min(n_hint, MAX_HINT - 1)
    assert line.count("m") >= min(n_message, MAX_ERROR - MAX_HINT - 2)


@given(st.text(st.sampled_from([*sorted(ACTING - {"\ud800"}), "a", '"', "\\"])))
def test_json_holds_the_same_values(text: str) -> None:
    """JSON makes one character of two halves in a row, which no decoded text has."""
    document = json_escaped(json.dumps({text: [text]}, ensure_ascii=False, indent=2))
    assert json.loads(document) == {text: [text]}
    assert not acting(document)
