"""Finds the form of a model's answers by what its chat template makes of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from engine.errors import TemplateError
from engine.text.messages import ChatMessage, Tool, ToolCall
from engine.text.thinking import THINKING_MARKS
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
    filled,
)
from engine.text.tool_calls.marks import CallBegun, CallEnded, CallText, PartText
from engine.text.tool_calls.parser import AnswerParser
from engine.text.tool_calls.turns import THOUGHT_KEYS, TemplateUse, ThoughtKey, as_functions

if TYPE_CHECKING:
    from engine.text.chat_template import ChatTemplate

KNOWN_FORMS = (
    SEED, QWEN_CODER, GLM, MINIMAX, DEEPSEEK_V32, DEEPSEEK_V4, HERMES, MISTRAL, NEMOTRON, APRIEL,
    GRANITE, COHERE, GIGACHAT, MISTRAL_ARGS, HARMONY, DEEPSEEK, DEEPSEEK_V31, KIMI, GEMMA,
    FUNCTION_GEMMA, FUNCTIONARY, LLAMA,
)  # fmt: skip
"""All forms, in the order in which a template's own call is tried with them."""


QUESTION = "What is the weather like?"
RESULT = "It rains in the probe."
PROBE = Tool(
    "look_at_weather", "Look at the weather.",
    '{"type": "object", "properties": {"city": {"type": "string", "description": "City"}, '
    '"days": {"type": "integer", "description": "Days"}}, "required": ["city"]}',
)  # fmt: skip
ARGUMENTS: dict[str, Any] = {"city": "Paris 7", "days": 3}
_WRITTEN_BLOCK = re.compile(r"""['"]type['"]: ?['"]thinking""")
"""Blocks of a content, as written by a template that takes them for text."""

_TYPES = {PROBE.name: {"city": ("string",), "days": ("integer",)}}


def detect(template: ChatTemplate) -> TemplateUse:
    """Return what a template makes of functions and calls, by rendering some."""
    use = _use_of_calls(template) or TemplateUse(_named_form(template.source))
    told = [ChatMessage("system", RESULT), ChatMessage("user", QUESTION)]
    return replace(
        use,
        form=_with_thinking(use.form, template.source),
        takes_system=_makes(template, told, RESULT),
    )


def _named_form(source: str) -> AnswerFormat:
    """Return the format whose mark a template names, as where it tells how to call, or Hermes's.

    Granite 3.3's writes no calls, and some would do so in ways that the sandbox refuses.
    """
    written = (form for form in KNOWN_FORMS if form.has_json_arguments)
    named = (form for form in written if form.trigger and form.trigger in source)
    return next(named, HERMES)


def _use_of_calls(template: ChatTemplate) -> TemplateUse | None:
    """Return how a template takes calls; None if it writes none in a known form, or no results."""
    question = ChatMessage("user", QUESTION)
    call = ToolCall(PROBE.name, json.dumps(ARGUMENTS), filled(KIMI.call_id, PROBE.name))
    called = [question, ChatMessage("assistant", "", tool_calls=(call,))]
    result = ChatMessage("tool", RESULT, tool_call_id=call.id, name=call.name)
    asked = _rendered(template, TemplateUse(writes_calls=True), [question], is_asked=True)
    if not asked:
        return None
    for empty, is_text in product(("", None), (False, True)):
        use = TemplateUse(
            writes_calls=True, has_text_arguments=is_text, empty=empty,
            has_short_ids="length != 9" in template.source,
            has_responses="tool_responses" in template.source,
        )  # fmt: skip
        written = _rendered(template, use, called)
        added = written.removeprefix(commonprefix((asked, written)))  # noqa: RUF071 of characters
        form = _form_of(added, written.rpartition(QUESTION)[2])
        if form and RESULT in _rendered(template, use, [*called, result]):
            return replace(
                use,
                form=form,
                shows_tools=PROBE.name in asked,
                takes_one_call=not _takes_two_calls(template, replace(use, form=form), call),
                thought_key=_thought_key(template, use, call),
            )
    return None


def _takes_two_calls(template: ChatTemplate, use: TemplateUse, call: ToolCall) -> bool:
    """Return whether a template writes all calls of a turn."""
    calls = (call, replace(call, id="functions.look_at_weather:1"))
    asked = [ChatMessage("user", QUESTION), ChatMessage("assistant", "", tool_calls=calls)]
    return _rendered(template, use, asked).rpartition(QUESTION)[2].count(ARGUMENTS["city"]) == 2


def _thought_key(template: ChatTemplate, use: TemplateUse, call: ToolCall) -> ThoughtKey:
    asked = [ChatMessage("user", QUESTION), ChatMessage("assistant", "", RESULT, (call,))]
    tried = (replace(use, thought_key=key) for key in THOUGHT_KEYS)
    written = ((use.thought_key, _rendered(template, use, asked)) for use in tried)
    found = (key for key, text in written if RESULT in text and not _WRITTEN_BLOCK.search(text))
    return next(found, THOUGHT_KEYS[0])


def _rendered(
    template: ChatTemplate,
    use: TemplateUse,
    messages: Sequence[ChatMessage],
    *,
    is_asked: bool = False,
) -> str:
    """Return what a template makes of messages, "" where it does not take them."""
    try:
        return template.render(use.turns(messages, ()), as_functions([PROBE]), is_asked)
    except TemplateError:
        return ""


def _makes(template: ChatTemplate, messages: Sequence[ChatMessage], text: str) -> bool:
    """Return whether a template takes messages, and `text` is in what it makes of them."""
    try:
        return text in template.render([{"role": m.role, "content": m.content} for m in messages])
    except TemplateError:
        return False


def _form_of(*answers: str) -> AnswerFormat | None:
    """Return the format in which a call is found in an answer; None for none.

    Args:
        answers: the answer from its first character on, but perhaps without the beginning of a
            mark; and with what stands before it.
    """
    tried = ((form, answer) for answer in answers for form in KNOWN_FORMS)
    return next((form for form, answer in tried if _has_the_call(form, answer)), None)


def _has_the_call(form: AnswerFormat, answer: str) -> bool:
    parser = AnswerParser(form, _TYPES)
    parts = [*parser.feed(answer), *parser.end()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallText))
    content = "".join(part.text for part in parts if isinstance(part, PartText))
    if any(other.trigger and other.trigger in content for other in KNOWN_FORMS):
        return False  # a form that has the same tags, but other marks around them
    is_whole = [part.is_whole for part in parts if isinstance(part, CallEnded)] == [True]
    return is_whole and names == [PROBE.name] and json.loads(arguments) == ARGUMENTS


def _with_thinking(form: AnswerFormat, source: str) -> AnswerFormat:
    """Return a form with the marks of thoughts that a template writes."""
    found = next((marks for marks in THINKING_MARKS if marks.opening in source), None)
    is_own = found is None or found.opening in form.marks
    if found is None or is_own:
        return form
    return form.with_thinking(found.opening, found.closing[0])
