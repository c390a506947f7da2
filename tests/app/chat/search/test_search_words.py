"""How a search query is split into words, and the snippets of hits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.search import AFTER, BEFORE, MAX_WORD, MAX_WORDS, folded, marked, parse_words, snippet


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", ()), ("   ", ()), ('""', ()), ('"', ()),
        ("Split  three\tcards", ("split", "three", "cards")),
        ('"three cards" split', ("three cards", "split")),
        ('say "not closed', ("say", "not closed")),
        ("„zwei Wörter“ «un été»", ("zwei worter", "un ete")),
        ("the THE the", ("the",)),
        ("c++ a.b* (x OR y) -z NEAR/2", ("c++", "a.b*", "(x", "or", "y)", "-z", "near/2")),
        ("Straße ﬁle", ("strasse", "file")),
        ("a\0b", ("a b",)),
    ],
)  # fmt: skip
def test_words_and_phrases(typed: str, words: tuple[str, ...]) -> None:
    assert parse_words(typed) == words


def test_a_pasted_book_is_no_search_of_all_its_words() -> None:
    words = parse_words(" ".join(f"{number}{'x' * 1000}" for number in range(1000)))
    assert len(words) == MAX_WORDS
    assert max(map(len, words)) == MAX_WORD


def test_a_snippet_is_around_the_first_word_in_one_line() -> None:
    text = "Before.\n\n" * 100 + "Here the Größe of\n\nit counts, and gröss again." + " after" * 100
    found = snippet(text, parse_words("grosse"))
    assert [found.text[start:end] for start, end in found.marks] == ["Größe"]
    assert "the Größe of it counts, and" in found.text
    assert found.text.startswith("…")
    assert found.text.endswith("…")
    assert len(found.text) <= BEFORE + AFTER + 2


def test_a_short_text_is_shown_whole_with_all_words_marked() -> None:
    found = marked("An abacus and a Bath", parse_words("ba and"))
    assert found.text == "An abacus and a Bath"
    assert [found.text[start:end] for start, end in found.marks] == ["ba", "and", "Ba"]


def test_characters_that_act_are_not_shown() -> None:
    assert "\x1b" not in snippet("red \x1b[31m word", ("word",)).text


@given(st.text(max_size=300), st.text(max_size=40))
def test_no_text_and_no_search_is_an_error(text: str, typed: str) -> None:
    words = parse_words(typed)
    found = snippet(text, words)
    assert all(0 <= start < end <= len(found.text) for start, end in found.marks)
    assert folded(typed) == folded(folded(typed)) or not typed.isascii()


@given(st.text("abc XYZ\n", max_size=400), st.text("abcxyz", min_size=1, max_size=4))
def test_a_word_is_found_wherever_it_stands(text: str, word: str) -> None:
    is_there = word in " ".join(text.lower().split())
    assert (word in folded(text)) is is_there
    found = snippet(text, (word,))
    assert bool(found.marks) is is_there
    assert {found.text[start:end].lower().replace(word, "") for start, end in found.marks} <= {
        ""
    } | {found.text[start:end].lower() for start, end in found.marks if end - start > len(word)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("where the *discriminant* \\(b^2\\) tells[^1].", "where the discriminant b^2 tells."),
        ("## Split\n\n- **all** cards\n- [x] `--split 3,1`", "Split all cards --split 3,1"),
        ("| a | b |\n|---|:-:|\n| one | two |", "a b one two"),
        ("a * b, snake_case and 2**8 stay", "a * b, snake_case and 2**8 stay"),
    ],
)
def test_a_snippet_has_no_signs_of_markdown(text: str, shown: str) -> None:
    words = (shown.split()[0].lower(),)
    assert snippet(text, words).text == shown


def test_signs_that_are_searched_are_shown() -> None:
    found = snippet("use **kwargs** here", ("**kwargs",))
    assert found.text == "use **kwargs** here"
    assert found.marks == ((4, 12),)
