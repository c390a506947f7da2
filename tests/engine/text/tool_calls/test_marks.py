"""Marks are found in text that is still coming, as the package regex finds partial matches."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.tool_calls.marks import AnswerMark
from engine.text.tool_calls.turns import ANSWER_FORMATS

MARKS = {
    mark.pattern: mark
    for form in ANSWER_FORMATS
    for region in form.layout.regions
    for mark in (region.opening, region.closing)
    if mark is not None and r"\Z" not in mark.pattern
}
PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "name", ">", "\n", " ",
    "<|channel|>", "commentary", "analysis", " to=functions.", "<|message|>", "<|constrain|>json",
    "<", "|", "[",
    "[TOOL_CALLS]", "[CALL_ID]", "abc", "[ARGS]", "call:", "<|tool_call>", "```", "json",
    "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|start|>assistant",
]  # fmt: skip


@given(st.sampled_from(sorted(MARKS)), st.lists(st.sampled_from(PIECES), max_size=7), st.data())
@settings(max_examples=200, deadline=None)
def test_marks_are_found_and_held_back_as_regex_does(
    pattern: str, pieces: list[str], data: st.DataObject
) -> None:
    whole = "".join(pieces)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    found, held = MARKS[pattern].find(text, 0)
    partial = regex.search(pattern, text, flags=regex.DOTALL, partial=True)
    complete = regex.search(pattern, text, flags=regex.DOTALL)
    if found is not None:
        assert complete is not None
        assert found.span() == complete.span()
        assert held == len(text)
    elif partial is not None and partial.end() > partial.start():
        assert held <= partial.start(), "it may still become a mark"
    if held < len(text):  # what is held back can become a mark: some text behind makes it one
        assert regex.fullmatch(pattern, text[held:], flags=regex.DOTALL, partial=True)
    assert MARKS[pattern].find(text, 0, is_ended=True)[1] == len(text)


def test_a_mark_with_many_optional_parts_stays_small() -> None:
    """Each part stood twice in the pattern of what has begun, so that compiling took a minute."""
    mark = AnswerMark(r"(?:a)?b{0,9}" * 30 + "c")
    assert len(mark._begun.pattern) < 3000
    assert mark.find("xabba", 0) == (None, 1)
    found, _ = mark.find("xabbac", 0)
    assert found is not None
    assert found[0] == "abbac"


@pytest.mark.parametrize("pattern", ["a.b", "^a", "(?:ab)*", "(?=a)", "a$"])
def test_a_pattern_of_another_kind_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"pattern|repeated"):
        AnswerMark(pattern)
