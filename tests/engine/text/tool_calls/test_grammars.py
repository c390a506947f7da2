"""Grammars of calls allow what models write in each format, and nothing that breaks a schema."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.errors import PromptError
from engine.text.messages import Tool
from engine.text.tool_calls.formats import (
    FUNCTION_GEMMA,
    GEMMA,
    HARMONY,
    HERMES,
    LLAMA,
    AnswerFormat,
)
from engine.text.tool_calls.grammars import grammar_of_calls
from engine.text.tool_calls.marks import AnswerMark
from engine.text.tool_calls.turns import ANSWER_FORMATS, written_call
from tests.helpers.answer_texts import CLOCK, TOOLS, WEATHER, parsed

BYTES = LLTokenizer("byte")
FORMS = [pytest.param(form, id=form.name) for form in ANSWER_FORMATS]
TRIGGERED = [pytest.param(form, id=form.name) for form in ANSWER_FORMATS if form.trigger]
ARGUMENTS = {"city": "Ulm", "days": 3}


def matcher(form: AnswerFormat, choice: str) -> LLMatcher:
    grammar = grammar_of_calls(form, TOOLS, {}, choice)
    assert bool(grammar.trigger or grammar.lead) == (choice == "auto")
    found = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not found.get_error()
    return found


def allowed(found: LLMatcher, text: str) -> bool:
    """Return whether a whole text has the form."""
    tokens = list(text.encode())
    if found.validate_tokens(tokens) < len(tokens):
        return False
    found.consume_tokens(tokens)
    return bool(found.is_accepting())


def written(form: AnswerFormat, name: str, days: str = "3") -> str:
    """Return a call of a function with arguments, as a model writes it."""
    arguments = f'{{"city": "Ulm", "days": {days}}}'
    if form in (GEMMA, FUNCTION_GEMMA):
        assert form.layout.calls is not None
        ((opening, closing),) = form.layout.calls.dialect.quotes
        arguments = f"{{city:{opening}Ulm{closing},days:{days}}}"
    if form.argument[0]:
        opening, closing = form.argument
        city, number = (opening.replace("IS_TEXT", is_text) for is_text in ("true", "false"))
        city = f"{city.replace('NAME', 'city')}Ulm{closing}"
        arguments = f"{city}{number.replace('NAME', 'days')}{days}{closing}"
    return written_call(form, name, arguments)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_as_the_model_writes_it_is_allowed_and_read(form: AnswerFormat) -> None:
    text = written(form, "get_weather")
    assert allowed(matcher(form, "required"), text)
    assert allowed(matcher(form, "=get_weather"), text)
    assert parsed(form, list(text)).calls == [("get_weather", ARGUMENTS)]
    if form is HARMONY:
        assert allowed(matcher(form, "required"), form.resumed + text)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_call_of_the_function_is_not_allowed(form: AnswerFormat) -> None:
    assert not allowed(matcher(form, "required"), "Hello")
    assert not allowed(matcher(form, "required"), written(form, "guess_weather"))
    assert not allowed(matcher(form, "=clock"), written(form, "get_weather"))
    if form not in (GEMMA, FUNCTION_GEMMA):  # whose values have any type
        assert not allowed(matcher(form, "required"), written(form, "get_weather", '"three"'))


@pytest.mark.parametrize("form", TRIGGERED)
def test_behind_its_trigger_a_call_has_its_form(form: AnswerFormat) -> None:
    text = written(form, "get_weather")
    assert text.startswith(form.trigger)
    found = matcher(form, "auto")
    assert allowed(found, text.removeprefix(form.trigger))
    assert found.is_stopped(), "the model may go on as it likes"


@pytest.mark.parametrize(
    "text",
    ['{"name": "get_weather", "parameters": {"city": "Ulm", "days": 3}}',
     '<|python_tag|>{"name": "clock", "parameters": {}}',
     '\n{\n  "type": "function",\n  "name" :"clock",\n  "parameters": {}\n}'],
)  # fmt: skip
def test_a_bare_call_has_its_form_however_its_name_is_spaced(text: str) -> None:
    found = matcher(LLAMA, "auto")
    assert allowed(found, text)
    assert found.is_stopped(), "the model may go on as it likes"
    ((name, _),) = parsed(LLAMA, list(text)).calls
    lead = AnswerMark(grammar_of_calls(LLAMA, TOOLS, {}, "auto").lead)
    begun, _ = lead.find(text, 0)
    assert begun is not None
    assert begun[0].endswith('"parameters":')
    assert name in begun[0]


@pytest.mark.parametrize(
    "text",
    ['{"name": "get_weather", "parameters": {"days": 3}}', '{"name": "clock", "parameters": []}',
     '{"name": "get_weather", "parameters": {"city": 3}}', '{"name": "guess", "parameters": {}}'],
)  # fmt: skip
def test_a_bare_call_keeps_to_the_schema(text: str) -> None:
    assert not allowed(matcher(LLAMA, "auto"), text)


def random_text(found: LLMatcher, draw: random.Random) -> str:
    """Return text of random bytes that a grammar allows, most of which end something."""
    ends, text = set(b'"}]<>/|\n1,: '), bytearray()
    while not found.is_stopped() and len(text) < 3000:
        if len(text) > 400 and found.is_accepting():
            break
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        possible = list(np.flatnonzero(bits[:256]))
        letters = [byte for byte in possible if byte < 127] or possible
        likely = [byte for byte in letters if byte in ends] or letters
        text.append(int(draw.choice(likely if draw.random() < 0.9 else letters)))
        found.consume_token(text[-1])
    return text.decode()


@pytest.mark.parametrize("form", FORMS)
def test_whatever_the_grammar_allows_is_read_as_calls(form: AnswerFormat) -> None:
    draw = random.Random(form.name)
    for _ in range(3):
        text = random_text(matcher(form, "required"), draw)
        read = parsed(form, [text])
        is_whole = len(text.encode()) < 3000
        assert read.calls if is_whole else (read.calls or read.broken), text
        assert not (is_whole and read.broken), text
        for name, arguments in [*read.calls, *read.broken]:
            assert name in ("get_weather", "clock")
            is_free = not is_whole or form in (GEMMA, FUNCTION_GEMMA)
            assert is_free or name == "clock" or "city" in arguments


def test_control_tokens_stand_as_tokens() -> None:
    tokens = {"<|channel|>": 11, "<|message|>": 12, "<|constrain|>": 13, "<|start|>": 14}
    grammar = grammar_of_calls(HARMONY, [CLOCK], tokens, "required")
    assert '(<[14]> "assistant")?' in grammar.text
    assert '<[11]> "commentary to=functions.clock " <[13]> "json" <[12]>' in grammar.text


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError):
        grammar_of_calls(HERMES, [replace(WEATHER, parameters="[]")], {}, "auto")


def test_definitions_are_known_where_an_argument_stands_alone() -> None:
    schema = {"properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
              "$defs": {"n": {"type": "integer"}}}  # fmt: skip
    tool = Tool("f", parameters=json.dumps(schema))
    for form in ANSWER_FORMATS:
        grammar = grammar_of_calls(form, [tool], {}, "required")
        found = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
        assert not found.get_error()
