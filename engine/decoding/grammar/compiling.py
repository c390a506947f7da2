"""Compiles grammars with llguidance, and checks them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from engine.decoding.grammar.schema import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_STATES,
    MAX_SYMBOLS,
    Schema,
    as_lark,
    error_of,
    place_of_rule,
    read_schema,
    told,
)
from engine.errors import GrammarError
from engine.sampling_params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""Regular expressions of what stands between the items of JSON, and behind a key.

That is the white space that most models write in a line. More would be no better to read for a
program, and a model that has lost its way might write nothing else.
"""

PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Line and column at the beginning of a message on a Lark grammar."""

REGEX_PLACE = re.compile(r"^ {4}( *)\^", re.MULTILINE)
"""The line with which a message on a regular expression points at a column."""

OPENING, CLOSING = "([{", ")]}"


def source_of(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance compiles.

    Raises:
        GrammarError: it is too long, nested too deep, or not written in its language.
    """
    if len(grammar.text) > MAX_CHARACTERS:
        n = len(grammar.text)
        raise GrammarError(
            f"The grammar has {n} characters; at most {MAX_CHARACTERS} are accepted."
        )
    if grammar.kind == "json_schema":
        return _schema_source(read_schema(grammar.text))
    from llguidance import LLMatcher

    _check_depth(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    text = as_lark(grammar.text) if grammar.kind == "gbnf" else grammar.text
    return LLMatcher.grammar_from_lark(text)


def _schema_source(schema: Schema) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False, "item_separator": ITEM_SEPARATOR,
            "key_separator": KEY_SEPARATOR, "lenient": False, "coerce_one_of": False,
        },
    )  # fmt: skip


def _check_depth(text: str) -> None:
    """Refuse brackets that are nested too deep for a parser's stack."""
    depth = 0
    for char in text:
        depth += (char in OPENING) - (char in CLOSING and depth > 0)
        if depth > MAX_DEPTH:
            raise GrammarError(f"The grammar is nested more than {MAX_DEPTH} deep.")


def limits() -> LLParserLimits:
    """Return what compiling a grammar and computing a mask may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
    )


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a grammar that was checked.

    Raises:
        GrammarError: llguidance refuses it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=limits())
    if problem := matcher.get_error():
        raise error_from(grammar, problem)
    return matcher


def check(grammar: Grammar) -> None:
    """Check a grammar, however long that takes; see `engine.decoding.grammar.checker` for limits.

    Raises:
        GrammarError: it cannot be used.
    """
    from llguidance import LLTokenizer

    matcher = compiled(grammar, LLTokenizer("byte"))
    is_possible = any(matcher.compute_bitmask()) and not matcher.get_error()
    if not is_possible and not matcher.is_accepting():
        problem = matcher.get_error() or "no text has this form"
        raise GrammarError(f"The grammar cannot be used: {told(problem)}.")


def error_from(grammar: Grammar, problem: str) -> GrammarError:
    """Return the error of a grammar that llguidance refuses.

    Args:
        problem: why it does.
    """
    if grammar.kind == "json_schema":
        return error_of(read_schema(grammar.text), problem, _problem_of)
    place = ""
    if grammar.kind == "regex" and (caret := REGEX_PLACE.search(problem)):
        place = f"column {len(caret[1]) + 1}"
    elif grammar.kind == "lark" and (found := PLACE.match(problem)):
        place = place_of_rule(grammar.text, problem) or f"line {found[1]}, column {found[2]}"
    at = f" at {place}" if place else ""
    why = told(PLACE.sub("", problem))
    return GrammarError(f"The grammar cannot be used{at}: {why}.", place)


def _problem_of(schema: Schema) -> str:
    """Return why llguidance refuses a schema; "" if it does not."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        _schema_source(schema), limits=limits()
    )
    return messages[0] if is_error else ""
