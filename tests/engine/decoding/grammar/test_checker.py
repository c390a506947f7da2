"""Grammars are checked within limits, and their errors name the place."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from engine import Cancelled, Grammar, GrammarError, check_grammar
from engine.decoding.grammar.checker import GrammarChecker
from engine.decoding.grammar.schema import MAX_AT_ONCE, read_schema
from engine.sampling_params import GrammarKind

CHAIN = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(40_000)) + 'a40000: "x"'
"""A grammar whose rules refer to each other too often for llguidance's stack."""


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


@pytest.mark.parametrize("number", [(1 << 64) - 1, 1 << 64, -(1 << 63) - 1, -17 * 10**20])
def test_numbers_that_llguidance_lacks_are_rounded(number: int) -> None:
    schema = {"type": "integer", "minimum": 0, "x": [number]}
    check_grammar(Grammar("json_schema", json.dumps(schema)))
    assert read_schema(json.dumps(schema))["x"] == [pytest.approx(number, rel=1e-15)]


def test_a_number_beyond_all_is_refused() -> None:
    error = problem("json_schema", '{"const": 1' + "0" * 400 + "}")
    assert "a number of 401 digits" in error.message


def test_a_form_that_nothing_has_is_refused() -> None:
    assert "no text can match it" in problem("json_schema", '{"$ref": "#"}').message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", CHAIN),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
        ("json_schema", json.dumps({"enum": [f"value {n}" for n in range(100_000)]})),
        ("json_schema", json.dumps({"enum": [f"v{n}" for n in range(50_000)], "pattern": "("})),
        ("regex", "(" * 50_000 + ")" * 50_000),
        ("gbnf", "root ::= " + "(" * 50_000 + '"a"'),
        ("json_schema", '{"$ref": "file:///etc/passwd"}'),
        ("json_schema", "\ud800"),
        ("lark", 'start: "\x00'),
    ],
    ids=["chain", "deep", "long", "large", "brackets", "deep gbnf", "file", "surrogate", "zero"],
)  # fmt: skip
def test_hostile_grammars_end_in_a_sentence(kind: GrammarKind, text: str) -> None:
    problem(kind, text)
    check_grammar(Grammar("regex", "a"))  # others are checked as before


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    check_grammar(Grammar("regex", "b"))  # the child has started
    monkeypatch.setattr("engine.decoding.grammar.checker.MAX_SECONDS", 0.5)
    hostile = {"type": "integer", "multipleOf": 1000003}
    assert "more than 0.5 seconds" in problem("json_schema", json.dumps(hostile)).message
    monkeypatch.undo()
    check_grammar(Grammar("regex", "c"))


CHILD = """
import json, sys
print(json.dumps({"is_ready": True}), flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "slow":
        sys.stdin.readline()
    error = {"message": "It is bad.", "hint": "Mend it.", "place": "#"}
    print(json.dumps(error if text == "bad" else {}), flush=True)
"""
"""A program that refuses "bad", and does not answer "slow"."""

WAIT_S = 20.0


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarChecker]:
    monkeypatch.setattr("engine.decoding.grammar.checker.COMMAND", [sys.executable, "-c", CHILD])
    monkeypatch.setattr("engine.decoding.grammar.checker.MAX_SECONDS", WAIT_S)
    found = GrammarChecker()
    yield found
    found.close()


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if CHILD in c.cmdline()]


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


class Check(threading.Thread):
    """A check on a thread."""

    def __init__(self, checker: GrammarChecker, text: str) -> None:
        super().__init__(daemon=True)
        self.is_cancelled, self.error = False, Exception()
        self._checker, self._grammar = checker, Grammar("regex", text)
        self.start()

    def run(self) -> None:
        try:
            self._checker.check(self._grammar, lambda: self.is_cancelled)
        except (Cancelled, GrammarError) as error:
            self.error = error

    def cancel(self) -> None:
        """Cancel the check, and wait for its end."""
        self.is_cancelled = True
        self.join(WAIT_S)
        assert isinstance(self.error, Cancelled)


def test_a_refusal_is_remembered(checker: GrammarChecker) -> None:
    found = []
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            checker.check(Grammar("regex", "bad"))
        found.append((caught.value.message, caught.value.place, caught.value.hint))
        checker.close()  # another check would start another child
    assert found[0] == found[1] == ("It is bad.", "#", "Mend it.")
    assert not children()


def test_a_cancelled_check_ends_its_child(checker: GrammarChecker) -> None:
    check = Check(checker, "slow")
    wait_until(lambda: bool(children()))
    start = time.monotonic()
    check.cancel()
    assert time.monotonic() - start < WAIT_S / 4
    assert not children()
    checker.check(Grammar("regex", "good"))


def test_only_so_many_are_checked_at_once(checker: GrammarChecker) -> None:
    slow = [Check(checker, "slow") for _ in range(MAX_AT_ONCE)]
    wait_until(lambda: len(children()) == MAX_AT_ONCE)
    waiting, other = Check(checker, "good"), Check(checker, "better")
    waiting.cancel()
    assert len(children()) == MAX_AT_ONCE
    slow[0].cancel()
    other.join(WAIT_S)
    assert not other.is_alive()
    assert type(other.error) is Exception
    for check in slow[1:]:
        check.cancel()
