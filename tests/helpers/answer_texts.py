"""Answers in every known form, as models write them, and readers of their parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.messages import Tool
from engine.text.tool_calls.formats import (
    APRIEL,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    FUNCTIONARY,
    GEMMA,
    GIGACHAT,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    QWEN_CODER,
    SEED,
    AnswerFormat,
)
from engine.text.tool_calls.json_text import parameters_of
from engine.text.tool_calls.marks import AnswerPartEvent, CallBegun, CallEnded, PartText
from engine.text.tool_calls.parser import AnswerParser

WEATHER = Tool(
    "get_weather", "Tell the weather.",
    json.dumps({"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"},
        "exact": {"type": ["boolean", "null"]}}}),
)  # fmt: skip
CLOCK = Tool("clock", "Tell the time.")
TOOLS = (WEATHER, CLOCK)
TYPES = {tool.name: parameters_of(tool.parameters) for tool in TOOLS}


@dataclass
class Read:
    """Parts of an answer, put together.

    Attributes:
        broken: names and arguments of calls that broke off.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)


def put_together(events: Iterable[AnswerPartEvent]) -> Read:
    """Return the parts that events tell; only a whole call may be a JSON object, and must be."""
    read, name, text, n_begun, is_open = Read(), "", "", 0, False
    for event in events:
        if isinstance(event, PartText):
            assert not is_open, "a call ends before anything else comes"
            setattr(read, event.part, getattr(read, event.part) + event.text)
        elif isinstance(event, CallBegun):
            assert not is_open, "one call comes after the other"
            assert event.index == n_begun, "calls are numbered from 0"
            name, text, n_begun, is_open = event.name, "", n_begun + 1, True
        elif isinstance(event, CallEnded):
            assert is_open
            is_open = False
            assert (event.index, event.is_whole) == (n_begun - 1, is_object(text)), text
            if event.is_whole:
                read.calls.append((name, json.loads(text)))
            else:
                read.broken.append((name, text))
        else:
            assert is_open
            assert event.index == n_begun - 1
            text += event.text
    assert not is_open
    return read


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def parsed(
    form: AnswerFormat, pieces: Sequence[str], *, prompt: str = "", hidden: Sequence[str] = (),
    types: Any = TYPES,
) -> Read:  # fmt: skip
    """Return the parts of an answer that comes in pieces."""
    parser = AnswerParser(form, types, prompt, hidden)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return put_together([*events, *parser.end()])


RAIN = {"city": 'Köln\n"Süd"', "days": 3, "where": {"x": [1, 2.5, None, True, "</tool_call>"]}}
_JSON = json.dumps(RAIN, ensure_ascii=False)
_XML_WHERE = json.dumps(RAIN["where"])
_BOTH = Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})])
_OBJECTS = (
    f'{{"name": "get_weather", "arguments": {_JSON}}}, {{"name": "clock", "arguments": {{}}}}'
)


def _dsml(section: str) -> str:
    """Return an answer in DeepSeek's markup."""
    return (
        f"<think>Which town?</think>I look.\n\n<｜DSML｜{section}>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln\n"Süd"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="where" string="false">{_XML_WHERE}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
        f"</｜DSML｜{section}>"
    )


ANSWERS: dict[AnswerFormat, tuple[str, Read]] = {
    HERMES: (
        "<think>\nWhich town?\n</think>\n\nI look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    QWEN_CODER: (
        "<think>\nWhich town?\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n"
        f'<parameter=city>\nKöln\n"Süd"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        f"<parameter=where>\n{_XML_WHERE}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    GLM: (
        "<think>Which town?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Köln\n"Süd"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n'
        f"<arg_key>where</arg_key>\n<arg_value>{_XML_WHERE}</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n</tool_call>",
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    LLAMA: (
        f'{{"name": "get_weather", "parameters": {_JSON}}}',
        Read(calls=[("get_weather", RAIN)]),
    ),
    MISTRAL: (
        '[THINK]Which town?[/THINK]I look.[TOOL_CALLS][{"name": "get_weather", "arguments": '
        f'{_JSON}, "id": "call00001"}}, {{"name": "clock", "arguments": {{}}, "id": "call00002"}}]',
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    MISTRAL_ARGS: (
        f"[THINK]Which town?[/THINK]I look.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_JSON}",
        Read("Which town?", "I look.", [("get_weather", RAIN)]),
    ),
    HARMONY: (
        "<|channel|>analysis<|message|>Which town?<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_JSON}<|call|>",
        Read("Which town?", "I look.", [("get_weather", RAIN)]),
    ),
    DEEPSEEK: (
        "<think>\nWhich town?\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f"function<｜tool▁sep｜>get_weather\n```json\n{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
        "function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    DEEPSEEK_V31: (
        "<think>Which town?</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    GEMMA: (
        "<|channel>thought\nWhich town?\n<channel|>I look.<|tool_call>call:get_weather{city:"
        '<|"|>Köln\n"Süd"<|"|>,days:3,where:{x:[1,2.5,null,true,<|"|></tool_call><|"|>]}}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        Read("Which town?", "I look.", [("get_weather", RAIN), ("clock", {})]),
    ),
    SEED: (
        "<seed:think>Which town?</seed:think>\nI look.\n<seed:tool_call>\n<function=get_weather>\n"
        '<parameter=city>Köln\n"Süd"</parameter>\n<parameter=days>3</parameter>\n'
        f"<parameter=where>{_XML_WHERE}</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
        _BOTH,
    ),
    MINIMAX: (
        "<think>\nWhich town?\n</think>\n\nI look.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Köln\n"Süd"</parameter>\n'
        '<parameter name="days">3</parameter>\n'
        f'<parameter name="where">{_XML_WHERE}</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        _BOTH,
    ),
    DEEPSEEK_V32: (_dsml("function_calls"), _BOTH),
    DEEPSEEK_V4: (_dsml("tool_calls"), _BOTH),
    NEMOTRON: (
        f"<think>\nWhich town?\n</think>\n\nI look.\n<TOOLCALL>[{_OBJECTS}]</TOOLCALL>",
        _BOTH,
    ),
    APRIEL: (f"<think>Which town?</think>I look.\n<tool_calls>[{_OBJECTS}]</tool_calls>", _BOTH),
    GRANITE: (f"<think>Which town?</think>I look.<|tool_call|>[{_OBJECTS}]", _BOTH),
    COHERE: (
        "<|START_THINKING|>Which town?<|END_THINKING|><|START_RESPONSE|>I look.<|END_RESPONSE|>"
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{_JSON}}},\n    {{"tool_call_id": "1", "tool_name": "clock", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        _BOTH,
    ),
    GIGACHAT: (
        "<think>Which town?</think>I look.<|function_call|>"
        f'{{"name": "get_weather", "arguments": {_JSON}}}',
        Read("Which town?", "I look.", [("get_weather", RAIN)]),
    ),
    KIMI: (
        "<think>Which town?</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions."
        f"get_weather:0<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>"
        "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        _BOTH,
    ),
    FUNCTION_GEMMA: (
        "<think>Which town?</think>I look.<start_function_call>call:get_weather{city:<escape>Köln\n"
        '"Süd"<escape>,days:3,where:{x:[1,2.5,null,true,<escape></tool_call><escape>]}}'
        "<end_function_call><start_function_call>call:clock{}<end_function_call>",
        _BOTH,
    ),
    FUNCTIONARY: (
        f"<think>Which town?</think>I look.<function=get_weather>{_JSON}</function>"
        "<function=clock>{}</function>",
        _BOTH,
    ),
}
"""An answer in each form, and its parts."""
