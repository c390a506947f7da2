"""Answers fall into the same parts as transformers finds, however their text is cut."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from engine.text.tool_calls.formats import (
    DEEPSEEK,
    DEEPSEEK_V32,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SEED,
    AnswerFormat,
    filled,
)
from engine.text.tool_calls.marks import CallBegun, CallEnded, CallText, PartText
from engine.text.tool_calls.parser import AnswerParser
from engine.text.tool_calls.turns import ANSWER_FORMATS, as_functions
from tests.helpers.answer_texts import ANSWERS, TOOLS, TYPES, Read, parsed, put_together

FORMS = [pytest.param(form, id=form.name) for form in ANSWER_FORMATS]


def oracle(form: AnswerFormat, text: str) -> Read:
    """Return the parts that transformers' parser finds by the same description."""
    description = copy.deepcopy(dict(form.description))
    assert form.layout.calls is not None
    found = parse_response(text, description, prefix="", tools=as_functions(TOOLS))
    calls = found.get("tool_calls", [])
    if form.layout.calls.kind == "list" and calls:
        (calls,) = calls  # a list in each region
    functions = [call["function"] for call in calls]
    content = found.get("content", "")
    for noise in form.noise:
        content = content.replace(noise, "")
    return Read(
        found.get("reasoning_content", ""), content.strip(),
        [(function["name"], function["arguments"]) for function in functions],
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_are_those_that_transformers_finds(form: AnswerFormat) -> None:
    text, read = ANSWERS[form]
    if form in (HERMES, GLM):  # a mark inside a string ends a call for transformers
        text, read = text.replace('</tool_call>"', '<end>"'), copy.deepcopy(read)
        read.calls[0][1]["where"]["x"][-1] = "<end>"
    assert parsed(form, [text]) == read == oracle(form, text)


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_anywhere_changes_nothing(form: AnswerFormat) -> None:
    text, read = ANSWERS[form]
    assert parsed(form, list(text)) == read
    for at in range(len(text)):
        assert parsed(form, [text[:at], text[at:]]) == read, text[:at]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_breaks_off_anywhere_is_not_whole(form: AnswerFormat) -> None:
    """Whole calls are those of the whole answer; `put_together` sees that the rest is no JSON."""
    text, read = ANSWERS[form]
    n_begun = 0
    for end in range(len(text)):
        if end % 4 == 0:  # the model itself may break off as well
            calls = parsed(form, [text[:end]]).calls
            assert calls == read.calls[: len(calls)]
        parser = AnswerParser(form, TYPES)
        found = put_together([*parser.feed(text[:end]), *parser.end(is_cut=True)])
        n_whole, n_calls = len(found.calls), len(found.calls) + len(found.broken)
        assert found.calls == read.calls[:n_whole]
        assert len(found.broken) <= 1
        assert n_begun <= n_calls <= n_begun + 1, "no call comes and goes"
        assert [n for n, _ in found.broken] == [n for n, _ in read.calls[n_whole:n_calls]]
        n_begun = n_calls
    assert n_begun == len(read.calls)


@pytest.mark.parametrize("form", [f for f in ANSWER_FORMATS if not f.is_bare], ids=lambda f: f.name)
def test_an_answer_that_is_cut_off_has_no_beginning_of_a_mark_in_its_content(
    form: AnswerFormat,
) -> None:
    text, read = ANSWERS[form]
    for end in range(text.index("I look."), len(text)):
        parser = AnswerParser(form, TYPES)
        found = put_together([*parser.feed(text[:end]), *parser.end(is_cut=True)])
        assert read.content.startswith(found.content.rstrip()), text[:end]
        assert found.reasoning == read.reasoning


@pytest.mark.parametrize("form", FORMS)
def test_what_may_begin_a_mark_is_held_back_no_longer_than_needed(form: AnswerFormat) -> None:
    """A "<" of prose comes with the next token, which tells that there is no mark."""
    marks = {form.trigger, form.thought[0].strip(), *form.around, *form.noise, "< ", "{ "}
    for mark in marks:
        for end in range(1, len(mark)):
            parser = AnswerParser(form, TYPES)
            parts = [*parser.feed("If a " + mark[:end]), *parser.feed(" §"), *parser.feed("b")]
            told = "".join(part.text for part in parts if isinstance(part, PartText))
            assert told == f"If a {mark[:end]} §b"


@pytest.mark.parametrize("form", FORMS)
def test_arguments_come_as_they_are_written(form: AnswerFormat) -> None:
    text, _ = ANSWERS[form]
    parser, place = AnswerParser(form, TYPES), text.index("Süd") + 1

    def told(more: str) -> str:
        return "".join(event.text for event in parser.feed(more) if isinstance(event, CallText))

    assert told(text[:place]).endswith("S")
    assert told("abc") == "abc"


@pytest.mark.parametrize("form", FORMS)
def test_without_functions_a_call_is_content(form: AnswerFormat) -> None:
    read = parsed(form, list(ANSWERS[form][0]), types=None)
    assert not read.calls
    assert "get_weather" in read.content


@pytest.mark.parametrize("form", [f for f in ANSWER_FORMATS if not f.is_bare], ids=lambda f: f.name)
def test_a_function_that_there_is_not_is_told_as_well(form: AnswerFormat) -> None:
    read = parsed(form, [ANSWERS[form][0].replace("get_weather", "guess_weather")])
    assert read.calls[0][0] == "guess_weather"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, 'Write <tool_call> and "name".'),
        (HERMES, '<tool_call>\n{"name": 5}\n</tool_call>'),
        (HERMES, "a < b, <tool, </tool_call"),
        (LLAMA, '{"name": "Anna", "parameters": {"age": 3}}'),
        (LLAMA, 'See: {"name": "clock", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] none"),
        (GEMMA, "<|tool_call>call:me"),
        (QWEN_CODER, "<tool_call> <function = x>"),
        (GLM, "<tool_call> x"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function"),
    ],
)
def test_what_only_looks_like_a_call_is_content(form: AnswerFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(form, pieces) == Read(content=text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}</tool_call>', {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('{"name": "f"}</tool_call>', {}),
        ('{"name": "f", "arguments": null}</tool_call>', {}),
        ('{"name": "f", "arguments": {"a": True, "b": None}}', {"a": True, "b": None}),
        ('{"name": "f", "arguments": {"a": "x\ny\\q"}}', {"a": "x\ny\\q"}),
    ],
)
def test_what_models_write_in_place_of_json_becomes_json(text: str, arguments: Any) -> None:
    assert parsed(HERMES, list("<tool_call>" + text)).calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": [1, {"b', '{"a": [1, {'),
        ('{"a": "x\\', '{"a": "x'),
        ('{"a": "home/anna', '{"a": "home/anna'),
        ('{"n": 12', '{"n": 12'),
        ('{"n": 12, "m": -', '{"n": 12, "m": '),
        ('{"a": 1 oops}', '{"a": 1'),
        ('{"a": ' * 500, '{"a": ' * 65),
    ],
)
def test_arguments_that_break_off_stay_open(arguments: str, told: str) -> None:
    read = parsed(HERMES, list('<tool_call>{"name": "f", "arguments": ' + arguments))
    assert (read.calls, read.broken) == ([], [("f", told)])


@pytest.mark.parametrize("form", [QWEN_CODER, GLM, MINIMAX], ids=lambda form: form.name)
def test_arguments_in_tags_are_whole_with_the_mark_behind_the_call(form: AnswerFormat) -> None:
    """Without it another argument might have followed."""
    text, _ = ANSWERS[form]
    begun = text[: text.index(filled(form.argument[0], "days"))].replace('Köln\n"Süd"', "Ulm")
    for rest in ("", "oops", form.behind[:4]):
        assert parsed(form, [begun + rest]).broken == [("get_weather", '{"city": "Ulm"')]
    assert parsed(form, [begun + form.behind]).calls == [("get_weather", {"city": "Ulm"})]


def several_calls(form: AnswerFormat, cities: Sequence[str]) -> str:
    """Return an answer that asks for the weather of some cities."""
    layout = form.layout.calls
    assert layout is not None

    def arguments(city: str) -> str:
        if layout.kind == "tags":
            around = (filled(text, "city").replace("IS_TEXT", "true") for text in form.argument)
            return city.join(around)
        if layout.dialect.has_bare_keys:
            return "{city:" + city.join(layout.dialect.quotes[0]) + "}"
        return json.dumps({"city": city})

    assert form.between is not None
    calls = (
        filled(form.before, "get_weather", at) + arguments(city) + form.behind
        for at, city in enumerate(cities)
    )
    return form.between.join(calls).join(form.around)


SEVERAL = [form for form in ANSWER_FORMATS if form.between is not None]


@pytest.mark.parametrize("form", SEVERAL, ids=lambda f: f.name)
def test_an_answer_is_over_at_a_call_that_repeats_an_earlier_one(form: AnswerFormat) -> None:
    """A call that only begins as an earlier one is told."""
    text = several_calls(form, ["Ulm", "Ulmen", "Ulm", "Bonn"])
    for pieces in ([text], list(text)):
        parser = AnswerParser(form, TYPES)
        found = put_together(
            [event for piece in [*pieces, " So."] for event in parser.feed(piece)] + parser.end()
        )
        weather = [("get_weather", {"city": city}) for city in ("Ulm", "Ulmen")]
        assert found == Read(calls=weather)
        assert parser.is_over


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_with_a_single_call_is_over_behind_it(form: AnswerFormat) -> None:
    text, read = ANSWERS[form]
    for pieces in ([text], list(text)):
        parser = AnswerParser(form, TYPES, is_single=True)
        found = put_together(event for piece in pieces for event in parser.feed(piece))
        assert found == replace(read, calls=read.calls[:1])
        assert parser.is_over
        assert not parser.end()


def test_arguments_as_python_writes_them_are_json() -> None:
    """As Seed-OSS has them, whose template writes them so."""
    value = "{'x': [None, \"a'\"]}"
    call = (
        f"<seed:tool_call>\n<function=get_weather>\n<parameter=where>{value}</parameter></function>"
    )
    ((_, arguments),) = parsed(SEED, [call]).calls
    assert arguments == {"where": {"x": [None, "a'"]}}


def test_a_value_that_says_it_is_text_is_no_number() -> None:
    answer = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="other" string="TEXT">7</｜DSML｜parameter>\n</｜DSML｜invoke>'
    )
    for is_text, value in (("true", "7"), ("false", 7)):
        ((_, arguments),) = parsed(DEEPSEEK_V32, [answer.replace("TEXT", is_text)]).calls
        assert arguments == {"other": value}


def test_text_behind_a_broken_call_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call> Sorry.'
    assert parsed(HERMES, list(text)) == Read("", "oops}}\nSorry.", broken=[("f", '{"a": 1')])


def test_a_prompt_may_have_opened_the_thought() -> None:
    assert parsed(HERMES, ["Hm.\n</think>\n\nYes."], prompt="…<think>\n") == Read("Hm.", "Yes.")
    assert parsed(HERMES, ["Yes."], prompt="<think>\n\n</think>\n\n") == Read("", "Yes.")
    opened = "<|start|>assistant<|channel|>analysis<|message|>"
    assert parsed(HARMONY, ["Hm.<|end|>"], prompt=opened) == Read("Hm.")


def test_control_tokens_are_never_shown() -> None:
    hidden = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    text = "<|channel|>final<|message|>One<|end|><|start|>user<|channel|>odd<|message|>Two"
    assert parsed(HARMONY, list(text), hidden=hidden) == Read("", "One\nuseroddTwo")
    broken = "[TOOL_CALLS]oops"
    assert parsed(MISTRAL, list(broken), hidden=["[TOOL_CALLS]"]) == Read("", "oops")


def test_several_calls_of_the_newer_mistral() -> None:
    text = "[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]get_weather[ARGS]" + json.dumps({"city": "P"})
    assert parsed(MISTRAL_ARGS, list(text)).calls == [("clock", {}), ("get_weather", {"city": "P"})]


def test_plain_text_is_told_at_once() -> None:
    """But for what may be a mark, and spaces that may stand before one."""
    parser = AnswerParser(HERMES, TYPES)
    assert parser.feed("One ") == [PartText("content", "One")]
    assert parser.feed("two <to") == [PartText("content", " two")]
    assert parser.feed("y>") == [PartText("content", " <toy>")]
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "f", "arguments": {') == [CallBegun(0, "f"), CallText(0, "{")]
    assert parser.feed('"a": 1}') == [CallText(0, '"a": 1}'), CallEnded(0, is_whole=True)]
    assert parser.end() == []


WORDS = [
    *{mark for f in ANSWER_FORMATS for mark in (f.trigger, *f.noise, *f.around) if mark},
    "<think>", "</think>", "</tool_call>", "<function=f>", "<parameter=p>", "</parameter>",
    "</function>", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "<|message|>", "<|end|>",
    '{"name": "f", "arguments": ', '"parameters": ', "{", "}", "[", "]", '"', ":", ",", "\\",
    "\\u12", "<", "|", "\n", " ", "1", "true", "call:f{a:", '<|"|>', "```json", "｜",
]  # fmt: skip


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_has_parts_and_loses_nothing(data: st.DataObject) -> None:
    """Words between marks turn up in some part; calls are JSON; cuts change nothing."""
    form = data.draw(st.sampled_from(ANSWER_FORMATS))
    drawn = data.draw(st.lists(st.sampled_from([*sorted(WORDS), *"WWWWWW"]), max_size=14))
    words = [f"w{n}ö" if word == "W" else word for n, word in enumerate(drawn)]
    read = parsed(form, ["".join(words)])
    assert parsed(form, list("".join(words))) == read
    if not read.calls:
        told = read.reasoning + read.content
        assert not [word for word in words if word.startswith("w") and word not in told]
