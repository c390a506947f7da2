"""Markdown as pieces: no raw markup, and streaming gives the same result as parsing at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat.markdown import (
    CodeBlock,
    MarkdownStream,
    Piece,
    Rule,
    Table,
    TextLine,
    TextSpan,
    parse,
)

LINES = [
    "plain text", "two  ", "", "", "# Heading", "#", "- item", "  - nested", "  more", "1. one",
    "7. seven", "> quote", ">", "```python", "```", "~~~", "    indented", "---", "===", "***",
    "| a | b |", "|---|:-:|", "| 1 | 2 |", "**bold** and `code`", "[x](http://y.z)", "[x]: http://y",
    "<div>", "</div>", "![alt](a.png)", "*", "+", "\ttab", "a\\", "&amp; &lt;", "<!-- no -->",
]  # fmt: skip


def streamed(text: str, cuts: list[int]) -> list[Piece]:
    """Return all pieces after feeding `text` in parts, those that are not final last."""
    stream, done, start = MarkdownStream(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        done += stream.feed(text[start:cut])
        start = max(start, cut)
        stream.tail()
    return done + stream.tail()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_text_that_streams_in_ends_as_if_read_at_once(data: st.DataObject) -> None:
    """The text may be cut anywhere, even inside a delimiter."""
    lines = data.draw(st.lists(st.sampled_from(LINES), max_size=14))
    text = "\n".join(lines)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert streamed(text, cuts) == parse(text)


def test_an_item_without_text_does_not_depend_on_the_block_before() -> None:
    text = "- item\n*\n*"
    assert streamed(text, []) == parse(text)
    assert [line.tight for line in parse("*\n*") if isinstance(line, TextLine)] == [False, True]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_can_be_shown(text: str) -> None:
    for piece in parse(text):
        assert isinstance(piece, TextLine | CodeBlock | Table | Rule)


def test_complete_blocks_are_handed_out_once_and_early() -> None:
    stream = MarkdownStream()
    assert stream.feed("one\n\ntwo") == []
    assert stream.feed("\n\nthree") == [TextLine((TextSpan("one"),))]
    assert stream.tail() == [TextLine((TextSpan("two"),)), TextLine((TextSpan("three"),))]


@pytest.mark.parametrize(
    "text",
    ["<b>x</b>", "<script>alert(1)</script>", "<img src=x onerror=y>", "<!-- c -->", "a <br/> b"],
)
def test_html_stays_text(text: str) -> None:
    assert parse(text) == [TextLine((TextSpan(text),))]


@pytest.mark.parametrize("address", ["javascript:x()", "file:///etc/passwd", "data:text/html,x"])
def test_addresses_that_are_not_of_the_web_cannot_be_opened(address: str) -> None:
    spans = [
        s
        for p in parse(f"[click]({address}) <{address}>")
        if isinstance(p, TextLine)
        for s in p.spans
    ]
    assert all(span.href == "" for span in spans)


def test_an_image_becomes_its_description_and_address() -> None:
    (line,) = parse("![a cat](https://x.org/cat.png)")
    assert isinstance(line, TextLine)
    assert "".join(span.text for span in line.spans) == "a cat (https://x.org/cat.png)"
    assert line.spans[1].href == "https://x.org/cat.png"


def test_styles_nest() -> None:
    (line,) = parse("**bold *both*** ~~gone~~ `a*b*`")
    assert isinstance(line, TextLine)
    assert TextSpan("both", bold=True, italic=True) in line.spans
    assert TextSpan("gone", strike=True) in line.spans
    assert TextSpan("a*b*", code=True) in line.spans


def test_lists_keep_their_numbers_depth_and_code() -> None:
    pieces = parse("3. three\n4. four\n   - deep\n\n     ```sh\n     ls\n     ```\n")
    marks = [(p.marker, p.indent) for p in pieces if isinstance(p, TextLine)]
    assert marks == [("3.", 1), ("4.", 1), ("•", 2)]
    assert pieces[-1] == CodeBlock("ls", "sh")


def test_a_table_keeps_rows_and_alignment() -> None:
    (table,) = parse("| a | b |\n|:--|--:|\n| 1 | **2** |\n| 3 |")
    assert isinstance(table, Table)
    assert table.aligns == ("left", "right")
    assert table.rows[1] == ((TextSpan("1"),), (TextSpan("2", bold=True),))
    assert len(table.rows[2]) == 2


def test_an_unfinished_code_block_is_code_already() -> None:
    stream = MarkdownStream()
    stream.feed("```python\nx = 1\ny")
    assert stream.tail() == [CodeBlock("x = 1\ny", "python")]
