"""Blocks of an answer: texts, thoughts and calls, as its events make them."""

from __future__ import annotations

from engine import AnswerBlocks, Event, Finished, TokenText, ToolCallBegun, Usage
from engine.generation.results import Timings, ToolCallEnded, ToolCallText

FINISHED = Finished("stop", Usage(), Timings())


def changes(blocks: AnswerBlocks, *events: Event) -> list[tuple[str, str, str]]:
    """Return kind and text of all changes."""
    return [(how, one.kind, text) for event in events for how, one, text in blocks.add(event)]


def test_a_block_ends_where_another_begins() -> None:
    blocks = AnswerBlocks()
    found = changes(
        blocks, TokenText("so", (1,), part="reasoning"), TokenText("", (2,)), TokenText("a", (3,)),
        TokenText("b", (4,)), ToolCallBegun(0, "x", "f"), ToolCallText(0, "{"),
        ToolCallText(0, "}"), ToolCallEnded(0, True), FINISHED,
    )  # fmt: skip
    assert found == [
        ("begun", "thought", ""), ("grown", "thought", "so"), ("ended", "thought", ""),
        ("begun", "text", ""), ("grown", "text", "a"), ("grown", "text", "b"),
        ("ended", "text", ""), ("begun", "call", ""), ("grown", "call", "{"),
        ("grown", "call", "}"), ("ended", "call", ""),
    ]  # fmt: skip
    assert (blocks.text_of("text"), blocks.text_of("thought")) == ("ab", "so")
    assert [(one.name, one.text, one.is_whole) for one in blocks.calls] == [("f", "{}", True)]
    assert blocks.finished is FINISHED


def test_a_call_in_which_an_answer_ends_is_not_whole() -> None:
    blocks = AnswerBlocks()
    changes(blocks, ToolCallBegun(0, "x", "f"), ToolCallText(0, "{"), FINISHED)
    assert not blocks.calls[0].is_whole
    cut = AnswerBlocks()
    changes(cut, ToolCallBegun(0, "x", "f"), ToolCallEnded(0, False), FINISHED)
    assert not cut.calls[0].is_whole


def test_a_text_that_is_cut_off_is_not_whole() -> None:
    blocks = AnswerBlocks()
    changes(blocks, TokenText("a", (1,)), Finished("length", Usage(), Timings()))
    assert not blocks.blocks[0].is_whole
