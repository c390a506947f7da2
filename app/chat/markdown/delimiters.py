r"""Formulas in Markdown: markdown-it rules that find formula delimiters.

`\(…\)`, `\[…\]` and `$$…$$` always delimit a formula. A single `$` is more often part of a price or
a shell variable; see `_after_dollar`. Formulas contain no empty lines and no backticks, so blocks
stay independent and code stays code. An unterminated formula is shown as source. Limits keep the
time linear in the text's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline

CLOSING: Final = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
"""Closing delimiters by opening delimiter, except `$`."""

DISPLAY: Final = ("\\[", "$$")
"""Opening delimiters of display formulas."""

MAX_LATEX: Final = 4000  # characters
MAX_LINES: Final = 200

PUNCTUATION: Final = " .,;"
"""Characters dropped after a display formula."""

AMOUNT: Final = re.compile(r"[\d.,]*\d[kKmMbB%]?(?!\w)")
WORD: Final = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
SIGNS: Final = re.compile(r"[\\^_{}=<>+*]")


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula: its LaTeX with and without delimiters, and whether it is in display style."""

    latex: str
    source: str
    is_display: bool = False


def formula_rules(parser: MarkdownIt) -> None:
    """Add rules to a parser for "formula" and "formula_block" tokens with a `Formula` in meta."""
    parser.inline.ruler.before("escape", "formula", _inline_rule)
    parser.block.ruler.before(
        "fence", "formula_block", _block_rule, {"alt": ["paragraph", "reference", "blockquote"]}
    )


def formula_at(text: str, start: int, end: int) -> tuple[Formula, int] | None:
    """Return the formula that starts at a position, and its end; None if there is no formula."""
    opening = text[start : start + 2]
    if opening in CLOSING:
        close = text.find(CLOSING[opening], start + 2, min(end, start + MAX_LATEX))
        after = close + 2
    else:
        opening = "$"
        close = _after_dollar(text, start, end)
        after = close + 1
    if close < 0:
        return None
    latex = text[start + len(opening) : close]
    if not latex.strip() or "`" in latex:
        return None
    return Formula(latex.strip(), text[start:after], opening in DISPLAY), after


def _after_dollar(text: str, start: int, end: int) -> int:
    # The position of the closing `$`, or -1. As in pandoc, no space may follow the opening `$` or
    # precede the closing one, and no digit may follow the closing one. In addition, no word
    # character may touch either from outside, and the next `$` in the line must be the closing one.
    # Text that starts like a price ("$5 or 6$") is a formula only if it has a math symbol.
    before = text[start - 1] if start else ""
    if before.isalnum() or before == "$" or start + 1 >= end or text[start + 1].isspace():
        return -1
    end = min(end, start + MAX_LATEX)
    close = text.find("$", start + 1, end)
    while close > 0 and text[close - 1] == "\\":
        close = text.find("$", close + 1, end)
    if close < 0 or text[close - 1].isspace():
        return -1
    after = text[close + 1 : close + 2]
    latex = text[start + 1 : close]
    if after.isalnum() or after == "$" or "\n" in latex:
        return -1
    is_price = AMOUNT.match(latex) and WORD.search(latex) and not SIGNS.search(latex)
    return -1 if is_price else close


def _inline_rule(state: StateInline, silent: bool) -> bool:
    text, start, end = state.src, state.pos, state.posMax
    if text[start] not in "\\$":
        return False
    found = formula_at(text, start, end)
    if found is not None:
        formula, state.pos = found
        if not silent:
            token = state.push("formula", "math", 0)
            token.content, token.meta = formula.source, {"formula": formula}
        return True
    if not _is_unfinished(text, start, end):
        return False
    if not silent:
        state.push("text", "", 0).content = text[start:end]
    state.pos = end
    return True


def _is_unfinished(text: str, start: int, end: int) -> bool:
    opening = text[start : start + 2]
    if opening not in CLOSING or end - start > MAX_LATEX or text.find("`", start, end) >= 0:
        return False
    if opening == "$$" and (start or text[2:3] in tuple("$0123456789")):
        return False
    return text.find(CLOSING[opening], start + 2, end) < 0


def _block_rule(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    # whether a line starts a formula depends on that line only, even if the formula is unterminated
    start = state.bMarks[first] + state.tShift[first]
    line = state.src[start : state.eMarks[first]]
    if state.is_code_block(first) or not _begins_block(line):
        return False
    if silent:
        return True
    lines = _lines_of_formula(state, first, end)
    state.line = first + len(lines)
    text = "\n".join(lines)
    found = formula_at(text, 0, len(text))
    if found is None:
        _add_paragraph(state, text, [first, state.line])
        return True
    formula, after = found
    token = state.push("formula_block", "math", 0)
    token.content, token.meta, token.map = formula.source, {"formula": formula}, [first, state.line]
    rest = text[after:].strip(PUNCTUATION)
    if rest:
        _add_paragraph(state, text[after:].strip(), None)
    return True


def _begins_block(line: str) -> bool:
    opening = line[:2]
    if opening not in DISPLAY or "`" in line:
        return False
    close = line.find(CLOSING[opening], 2)
    if close < 0:
        return opening != "$$" or line[2:3] not in tuple("$0123456789")
    return bool(line[2:close].strip()) and not line[close + 2 :].strip(PUNCTUATION)


def _lines_of_formula(state: StateBlock, first: int, end: int) -> list[str]:
    lines: list[str] = []
    n_left = MAX_LATEX
    start = state.bMarks[first] + state.tShift[first]
    closing = CLOSING[state.src[start : start + 2]]
    for at in range(first, min(end, first + MAX_LINES)):
        if at > first and (state.isEmpty(at) or state.sCount[at] < state.blkIndent):
            break
        line = state.src[state.bMarks[at] + state.tShift[at] : state.eMarks[at]].rstrip()
        n_left -= len(line) + 1
        if lines and ("`" in line or n_left < 0):
            break
        lines.append(line)
        if line.find(closing, 0 if at > first else 2) >= 0:
            break
    return lines


def _add_paragraph(state: StateBlock, text: str, lines: list[int] | None) -> None:
    # without `lines`, the paragraph belongs to the preceding block
    state.push("paragraph_open", "p", 1).map = lines
    inline = state.push("inline", "", 0)
    inline.content, inline.map, inline.children = text, lines, []
    state.push("paragraph_close", "p", -1)
