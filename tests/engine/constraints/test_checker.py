"""Grammars are checked within limits, and their errors name the place."""

import json

import pytest

from engine import Grammar, GrammarError, check_grammar
from engine.config.grammar import GrammarKind


def problem(kind: GrammarKind, text: str) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check_grammar(Grammar(kind, text))
    assert "Traceback" not in caught.value.message
    assert caught.value.message.endswith(".")
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"properties": {"a": {"type": "foo"}}}, "#/properties/a/type", "Invalid type: foo"),
        ({"items": {"anyOf": [{}, {"not": {}}]}}, "#/items/anyOf/1/not", "Unimplemented keys"),
        ({"properties": {"a/b": {"format": "x", "type": "string"}}}, "#/properties/a~1b/format",
         "Unknown format: x"),
        ({"$defs": {"d": {"pattern": "a(", "type": "string"}}, "$ref": "#/$defs/d"},
         "#/$defs/d/pattern", "unclosed group"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "#/properties/a/$ref", "does not exist"),
        ({"properties": {"a": {"$ref": "https://example.org/x.json"}}}, "#/properties/a/$ref",
         "https://example.org/x.json"),
        ({"properties": {"a": {"minLength": -1, "type": "string"}}}, "#/properties/a/minLength",
         "-1"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "#", "greater than"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "#/oneOf", "oneOf"),
        ({"enum": []}, "#/enum", "empty"),
        ({"required": "a"}, "#/required", "array"),
        ([1], "#", "object"),
    ],
)  # fmt: skip
def test_the_wrong_part_of_a_schema_is_named(schema: object, place: str, why: str) -> None:
    error = problem("json_schema", json.dumps(schema))
    assert error.place == place
    assert why in error.message


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        ("json_schema", '{\n  "type": string}', "line 2, column 11"),
        ("lark", 'start: "a"\n  | foo', "line 2, column 5"),
        ("gbnf", 'root ::= "a"\nb ::= [a', "line 2, column 9"),
        ("gbnf", 'root ::= "a" |\n  missing', "line 2, column 3"),
        ("regex", "ab(c", "column 3"),
    ],
)
def test_the_place_in_a_text_is_named(kind: GrammarKind, text: str, place: str) -> None:
    error = problem(kind, text)
    assert error.place == place
    assert place in error.message


def test_a_form_that_nothing_has_is_refused() -> None:
    assert "no text has this form" in problem("json_schema", '{"$ref": "#"}').message
