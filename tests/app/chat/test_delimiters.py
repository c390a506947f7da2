"""Formulas and prices: delimiters in Markdown."""

import random
import time

import pytest

from app.chat.markdown import CodeBlock, DisplayFormula, MarkdownStream, Piece, TextLine, parse


def formulas(text: str) -> list[str]:
    """Return the LaTeX of all formulas in a text."""
    found = []
    for piece in parse(text):
        if isinstance(piece, DisplayFormula):
            found.append(piece.formula.latex)
        elif isinstance(piece, TextLine):
            found += [span.formula.latex for span in piece.spans if span.formula]
    return found


def shown(text: str) -> str:
    """Return the text of the only line."""
    (line,) = parse(text)
    assert isinstance(line, TextLine)
    return "".join(span.text for span in line.spans)


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5.", "It costs $5 and $10.", "from $5 to $10", "$5-$10", "$5–$10", "$5/$10",
        "$1,000.00 or $2,000.00", "$20+$5", "($20)/($30)", "US$5 or A$7", "US$ 5, A$ 7", "5$ or 6$",
        "5$ and 10$ more", "$5 (or $6) and 7$", "$5 million, then 3 million $",
        "$3.50/hour vs 4$/hour",
        "$100k and 200k$ a year", "$HOME/bin and $PATH", "$HOME:$PATH", "echo $A, $B", "a $ b $ c",
        "$ 5 and 6$", "$5$10", "the $ sign", "$$", "$", "$$$", "costs $5\nand 6$",
        "\\$5 and \\$6",
        "`$x$`", "``a $x$ b``", "`\\(x\\)`", "pay $5 `or` 6$", "$7 billion in 2020 and 9$ now",
        "I have $20 in my wallet, you have 30$.", "$1M raise at 10M$",
        "$20 USD is 18 EUR or 30 CAD$",
    ],
)  # fmt: skip
def test_prices_variables_and_code_are_no_formulas(text: str) -> None:
    assert formulas(text) == []


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("$x$", "x"), ("a $x^2$, b", "x^2"), ("($n$)", "n"), ("$5$", "5"),
        ("$5x + 3 = 8$", "5x + 3 = 8"),
        ("$5 \\text{ dollars}$", "5 \\text{ dollars}"), ("$\\$5$", "\\$5"), ("**$x$**", "x"),
        ("\\(x\\)", "x"), ("\\( x + y \\)", "x + y"), ("\\(5\\)", "5"), ("\\[x\\]", "x"),
        ("$$x$$", "x"),
        ("a $$x$$ b", "x"), ("a \\[x\\] b", "x"), ("\\(a\nb\\)", "a\nb"), ("$$\nx\n$$", "x"),
        ("\\[\nx\n- y\n\\]", "x\n- y"), ("> $$\n> x\n> $$", "x"), ("1. \\[ x \\]", "x"),
        ("text\n\\[\nx\n\\]\ntext", "x"), ("$$x$$.", "x"), ("\\(a_1*b*c\\)", "a_1*b*c"),
        ("$\\frac{1}{2}$-th", "\\frac{1}{2}"), ("$x$-axis", "x"), ("$5 and $x$", "x"),
    ],
)  # fmt: skip
def test_formulas_are_found(text: str, latex: str) -> None:
    assert formulas(text) == [latex]


def test_a_formula_in_a_line_of_its_own_is_a_piece() -> None:
    assert [type(p) for p in parse("a\n$$\nx\n$$\nb")] == [TextLine, DisplayFormula, TextLine]
    (piece,) = parse("> - \\[x\\]")[-1:]
    assert isinstance(piece, DisplayFormula)
    assert (piece.indent, piece.quote) == (1, 1)


@pytest.mark.parametrize(
    "text", ["\\(a *b* c", "see \\[ a *b* c", "\\[\na *b*", "$$\na *b* c", "$$a_1*b*c"]
)
def test_an_unfinished_formula_is_shown_as_it_was_written(text: str) -> None:
    assert shown(text) == text


def test_fences_hold_no_formula() -> None:
    assert parse("```\n$x$ \\(y\\)\n\\[z\\]\n```") == [CodeBlock("$x$ \\(y\\)\n\\[z\\]")]
    assert formulas("    $x$ is indented code") == []


LINES = [
    "\\[", "\\]", "$$", "$$ x", "a \\(x", "y\\) b", "$x$ and $5", "", "- \\[x", "> $$",
    "[^1]: note",
    "see[^1]", "    more", "- [ ] task", "1. [x] done",
    "https://a.b/c", "```", "| $a$ | b |",
    "|---|---|", "text",
]  # fmt: skip


def streamed(text: str, step: int) -> list[Piece]:
    stream, done = MarkdownStream(), list[Piece]()
    for start in range(0, len(text), step):
        done += stream.feed(text[start : start + step])
    return done + stream.tail()


@pytest.mark.parametrize("seed", range(60))
def test_a_text_with_formulas_and_notes_streams_in_as_if_read_at_once(seed: int) -> None:
    choose = random.Random(seed)
    text = "\n".join(choose.choice(LINES) for _ in range(choose.randint(1, 14)))
    assert streamed(text, choose.randint(1, 9)) == parse(text)


@pytest.mark.parametrize(
    "text",
    ["$" * 20_000, "\\(" * 20_000, "\\[" * 20_000, "$a" * 20_000, "$$a" * 20_000, "\\(`" * 10_000,
     "$$\n" * 10_000, "\\[\n" * 10_000, "> $$\n" * 5_000],
)  # fmt: skip
def test_many_delimiters_take_little_time(text: str) -> None:
    start = time.process_time()
    parse(text)
    assert time.process_time() - start < 5
