"""Renders probes to detect how a chat template handles calls, and prepares its messages.

The rendered call also determines the format of a model's answers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine.errors import PromptError, Sentence, TemplateError
from engine.text.messages import THINKING_MARKS, ChatMessage, Tool, ToolCall
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

if TYPE_CHECKING:
    from engine.text.chat_template import ChatTemplate

Turn = dict[str, Any]

NO_PARAMETERS = '{"type": "object", "properties": {}}'
ThoughtKey = Literal["reasoning_content", "reasoning", "thinking", "blocks"]
"""Key of the thinking in a turn; "blocks" for content blocks, one of which is the thinking."""

THOUGHT_KEYS: tuple[ThoughtKey, ...] = get_args(ThoughtKey)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class TemplateUse:
    """How a chat template handles functions and calls.

    Attributes:
        form: format of the model's answers.
        writes_calls: whether the template renders calls and their results.
        shows_tools: whether it describes the functions to the model.
        has_text_arguments: whether it takes arguments as text, not as an object.
        empty: content of a turn that consists only of calls.
        takes_system: whether it takes a system prompt.
        has_short_ids: whether call ids must consist of nine letters and digits.
        takes_one_call: whether it takes at most one call per turn.
        thought_key: key under which it expects thinking.
        has_responses: whether it expects results in the same turn as the calls.
    """

    form: AnswerFormat = HERMES
    writes_calls: bool = False
    shows_tools: bool = False
    has_text_arguments: bool = False
    empty: str | None = ""
    takes_system: bool = True
    has_short_ids: bool = False
    takes_one_call: bool = False
    thought_key: ThoughtKey = "reasoning_content"
    has_responses: bool = False

    def turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[Turn]:
        """Return the turns of a conversation, with the functions if the template does not show
        them.

        Raises:
            PromptError: the schema of a function is not a JSON object.
        """
        if self.writes_calls:
            if self.takes_one_call:
                messages = _one_by_one(messages)
            if self.form.call_id:
                messages = _numbered(messages, self.form.call_id)
            names = {call.id: call.name for message in messages for call in message.tool_calls}
            turns = [self._turn(message, names) for message in messages]
            if self.has_responses:
                turns = _with_responses(turns)
        else:
            turns = _as_text(messages, self.form)
        if tools and not self.shows_tools:
            self._describe(turns, tools)
        return turns

    def continuation(self, message: ChatMessage, prompt: str) -> str:
        """Return the text of an answer to be continued, as it follows `prompt`."""
        if not message.reasoning:
            return message.content
        opening, closing = self.form.thought
        if prompt.rstrip().endswith(opening.strip()):
            opening = ""
        return opening + message.reasoning + (closing + message.content if message.content else "")

    def _turn(self, message: ChatMessage, names: Mapping[str, str]) -> Turn:
        turn: Turn = {"role": message.role, "content": message.content}
        if message.reasoning and self.thought_key != "blocks":
            turn[self.thought_key] = message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [
                self._call(call, number) for number, call in enumerate(message.tool_calls)
            ]
            if not message.content:
                turn["content"] = self.empty
            elif self.thought_key == "thinking":  # gpt-oss accepts only one text before a call
                turn["thinking"] = "\n\n".join(filter(None, (message.reasoning, message.content)))
                turn["content"] = ""
        if message.reasoning and self.thought_key == "blocks":
            turn["content"] = [{"type": "thinking", "thinking": message.reasoning}]
            if message.content:
                turn["content"].append({"type": "text", "text": message.content})
        if message.role == "tool":
            turn["tool_call_id"] = self._id(message.tool_call_id, 0)
            turn["name"] = message.name or names.get(message.tool_call_id, "")
        return turn

    def _call(self, call: ToolCall, number: int) -> Turn:
        try:
            parsed = read_object(call.arguments, "")
        except PromptError:  # clients send incomplete calls back; their results explain the error
            parsed = {}
        arguments = json.dumps(parsed, ensure_ascii=False) if self.has_text_arguments else parsed
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id, number), "type": "function", "function": function}

    def _id(self, given: str, number: int) -> str:
        if self.has_short_ids and not _SHORT_ID.fullmatch(given):
            return hashlib.sha256((given or str(number)).encode()).hexdigest()[:9]
        return given or f"call{number:05}"

    def _describe(self, turns: list[Turn], tools: Sequence[Tool]) -> None:
        text = description(self.form, tools)
        role = "system" if self.takes_system else "user"
        for turn in turns:
            if turn["role"] == role:
                both = (turn["content"], text) if role == "system" else (text, turn["content"])
                turn["content"] = "\n\n".join(filter(None, both))
                return
        turns.insert(0, {"role": role, "content": text})


def has_more_than_text(message: ChatMessage) -> bool:
    """Return whether a message has thinking or calls, or is the result of a call."""
    return bool(message.reasoning or message.tool_calls or message.role == "tool")


def as_functions(tools: Sequence[Tool]) -> list[Turn]:
    """Return functions in the format of templates.

    Raises:
        PromptError: a schema is not a JSON object.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": read_object(
                    tool.parameters or NO_PARAMETERS,
                    Sentence("The schema of the function {name}", name=tool.name),
                ),
            },
        }
        for tool in tools
    ]


def description(form: AnswerFormat, tools: Sequence[Tool]) -> str:
    """Return text that tells the model about the functions and the call format."""
    example = written_call(form, "FUNCTION", '{"ARGUMENT": "VALUE"}')
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_functions(tools))
    return (
        "You may call functions. Each line describes one, with the JSON schema of its arguments:\n"
        f"{listed}\n\nTo call a function, end your answer with its name and arguments like this:\n"
        f"{example}\n"
        "The result comes with the next message."
    )


def written_call(form: AnswerFormat, name: str, arguments: str) -> str:
    """Return a call as the model writes it, in a format with JSON arguments."""
    before, behind = form.around
    return before + filled(form.before, name) + arguments + form.behind + behind


def read_object(text: str, what: str) -> Turn:
    """Parse a JSON object; `what` names it in errors.

    Raises:
        PromptError: the text is not a JSON object.
    """
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise PromptError(
            "{what} cannot be read as JSON: {problem}.", what=what, problem=str(error)
        ) from error
    if not isinstance(parsed, dict):
        raise PromptError("{what} must be a JSON object.", what=what)
    return parsed


def _as_text(messages: Sequence[ChatMessage], form: AnswerFormat) -> list[Turn]:
    """Return text-only turns: calls as a model writes them, results as questions."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if turns and turns[-1]["role"] == "user":
                turns[-1]["content"] += "\n" + result
            else:
                turns.append({"role": "user", "content": result})
            continue
        calls = [written_call(form, call.name, call.arguments) for call in message.tool_calls]
        turn: Turn = {
            "role": message.role,
            "content": "\n".join(filter(None, (message.content, *calls))),
        }
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        turns.append(turn)
    return turns


def _one_by_one(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with each call in its own turn, followed by its results."""
    single: list[ChatMessage] = []
    calling = ChatMessage("assistant", "")  # the last turn with calls
    waiting: list[ToolCall] = []  # its calls that are not in `single` yet
    for message in messages:
        if message.role != "tool":
            single += [replace(calling, tool_calls=(call,)) for call in waiting]
            waiting = list(message.tool_calls[1:])
            calling = replace(message, content="", reasoning="")
            single.append(replace(message, tool_calls=message.tool_calls[:1]))
        else:
            ids = [call.id for call in waiting]
            if message.tool_call_id in ids:
                n = ids.index(message.tool_call_id) + 1
                single += [replace(calling, tool_calls=(call,)) for call in waiting[:n]]
                del waiting[:n]
            single.append(message)
    return [*single, *(replace(calling, tool_calls=(call,)) for call in waiting)]


def _numbered(messages: Sequence[ChatMessage], call_id: str) -> list[ChatMessage]:
    """Return messages with call ids made of the function name and a number, also in results."""
    names: dict[str, str] = {}
    numbered: list[ChatMessage] = []
    n_calls = 0
    for message in messages:
        calls: list[ToolCall] = []
        for call in message.tool_calls:
            name = filled(call_id, call.name, n_calls)
            names[call.id] = name
            calls.append(replace(call, id=name))
            n_calls += 1
        answers = names.get(message.tool_call_id, message.tool_call_id)
        numbered.append(replace(message, tool_calls=tuple(calls), tool_call_id=answers))
    return numbered


def _with_responses(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with results merged into the turns of their calls, for Gemma 4's template."""
    merged: list[Turn] = []
    for turn in turns:
        if turn["role"] != "tool" or not merged or "tool_calls" not in merged[-1]:
            merged.append(turn)
            continue
        try:
            response: object = json.loads(turn["content"])
        except (ValueError, RecursionError):
            response = turn["content"]
        if not isinstance(response, dict):
            response = turn["content"]
        results = merged[-1].setdefault("tool_responses", [])
        results.append({"name": turn["name"], "response": response})
    return merged


ANSWER_FORMATS = (
    SEED, QWEN_CODER, GLM, MINIMAX, DEEPSEEK_V32, DEEPSEEK_V4, HERMES, MISTRAL, NEMOTRON, APRIEL,
    GRANITE, COHERE, GIGACHAT, MISTRAL_ARGS, HARMONY, DEEPSEEK, DEEPSEEK_V31, KIMI, GEMMA,
    FUNCTION_GEMMA, FUNCTIONARY, LLAMA,
)  # fmt: skip
"""All formats, in the order in which they are tried on a template's rendered call."""


QUESTION = "What is the weather like?"
RESULT = "It rains in the probe."
PROBE = Tool(
    "look_at_weather", "Look at the weather.",
    '{"type": "object", "properties": {"city": {"type": "string", "description": "City"}, '
    '"days": {"type": "integer", "description": "Days"}}, "required": ["city"]}',
)  # fmt: skip
ARGUMENTS: dict[str, Any] = {"city": "Paris 7", "days": 3}
_WRITTEN_BLOCK = re.compile(r"""['"]type['"]: ?['"]thinking""")
"""Content blocks, as rendered by a template that mistakes them for text."""

_TYPES = {PROBE.name: {"city": ("string",), "days": ("integer",)}}


def detect(template: ChatTemplate) -> TemplateUse:
    """Render probes to find out how a template handles functions and calls."""
    use = _use_of_calls(template) or TemplateUse(_named_form(template.source))
    return replace(
        use, form=_with_thinking(use.form, template.source), takes_system=_takes_system(template)
    )


def _named_form(source: str) -> AnswerFormat:
    """Return the format whose mark is in the template (e.g. in its instructions), or else Hermes's.

    Granite 3.3's template renders no calls, and some others render them in ways that the sandbox
    refuses.
    """
    written = (form for form in ANSWER_FORMATS if form.has_json_arguments)
    named = (form for form in written if form.trigger and form.trigger in source)
    return next(named, HERMES)


def _use_of_calls(template: ChatTemplate) -> TemplateUse | None:
    """Return how a template handles calls; None if it renders no known format, or no results."""
    question = ChatMessage("user", QUESTION)
    call = ToolCall(PROBE.name, json.dumps(ARGUMENTS), filled(KIMI.call_id, PROBE.name))
    called = [question, ChatMessage("assistant", "", tool_calls=(call,))]
    result = ChatMessage("tool", RESULT, tool_call_id=call.id, name=call.name)
    prompt = _rendered(template, TemplateUse(writes_calls=True), [question], is_prompt=True)
    if not prompt:
        return None
    for empty, is_text in product(("", None), (False, True)):
        use = TemplateUse(
            writes_calls=True, has_text_arguments=is_text, empty=empty,
            has_short_ids="length != 9" in template.source,
            has_responses="tool_responses" in template.source,
        )  # fmt: skip
        written = _rendered(template, use, called)
        added = written.removeprefix(commonprefix((prompt, written)))  # noqa: RUF071 of characters
        form = _form_of(added, written.rpartition(QUESTION)[2])
        if form and RESULT in _rendered(template, use, [*called, result]):
            return replace(
                use,
                form=form,
                shows_tools=PROBE.name in prompt,
                takes_one_call=not _takes_two_calls(template, replace(use, form=form), call),
                thought_key=_thought_key(template, use, call),
            )
    return None


def _takes_two_calls(template: ChatTemplate, use: TemplateUse, call: ToolCall) -> bool:
    calls = (call, replace(call, id="functions.look_at_weather:1"))
    messages = [ChatMessage("user", QUESTION), ChatMessage("assistant", "", tool_calls=calls)]
    answer = _rendered(template, use, messages).rpartition(QUESTION)[2]
    return answer.count(ARGUMENTS["city"]) == 2


def _thought_key(template: ChatTemplate, use: TemplateUse, call: ToolCall) -> ThoughtKey:
    messages = [ChatMessage("user", QUESTION), ChatMessage("assistant", "", RESULT, (call,))]
    for key in THOUGHT_KEYS:
        text = _rendered(template, replace(use, thought_key=key), messages)
        if RESULT in text and not _WRITTEN_BLOCK.search(text):
            return key
    return THOUGHT_KEYS[0]


def _rendered(
    template: ChatTemplate, use: TemplateUse, messages: Sequence[ChatMessage], *,
    is_prompt: bool = False,
) -> str:  # fmt: skip
    try:
        return template.render(use.turns(messages, ()), as_functions([PROBE]), is_prompt)
    except TemplateError:
        return ""


def _takes_system(template: ChatTemplate) -> bool:
    turns = [{"role": "system", "content": RESULT}, {"role": "user", "content": QUESTION}]
    try:
        return RESULT in template.render(turns)
    except TemplateError:
        return False


def _form_of(*answers: str) -> AnswerFormat | None:
    """Return the format in which a call is found in an answer, or None.

    One answer is only what the call adds to the prompt, which may lack the beginning of a mark; the
    other includes the preceding text.
    """
    pairs = ((form, answer) for answer in answers for form in ANSWER_FORMATS)
    return next((form for form, answer in pairs if _has_the_call(form, answer)), None)


def _has_the_call(form: AnswerFormat, answer: str) -> bool:
    parser = AnswerParser(form, _TYPES)
    parts = [*parser.feed(answer), *parser.end()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallText))
    content = "".join(part.text for part in parts if isinstance(part, PartText))
    if any(other.trigger and other.trigger in content for other in ANSWER_FORMATS):
        return False  # the call belongs to a format with the same tags inside other marks
    is_whole = [part.is_whole for part in parts if isinstance(part, CallEnded)] == [True]
    return is_whole and names == [PROBE.name] and json.loads(arguments) == ARGUMENTS


def _with_thinking(form: AnswerFormat, source: str) -> AnswerFormat:
    marks = next((marks for marks in THINKING_MARKS if marks.opening in source), None)
    if marks is None or marks.opening in form.marks:
        return form
    return form.with_thinking(marks.opening, marks.closing[0])
