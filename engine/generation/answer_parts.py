"""The form that an answer must have: a grammar that was asked for, or that of calls."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.decoding.grammar.checker import check_grammar
from engine.errors import Cancelled, EngineError, GrammarError, PromptError, ToolError
from engine.generation.results import (
    Finished,
    GenerationEvent,
    TokenLogprob,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from engine.sampling_params import Grammar
from engine.text.messages import (
    THINK_CLOSE,
    THINK_OPEN,
    ThinkingMarks,
    ThoughtMarker,
    thinking_marks,
)
from engine.text.tool_calls.grammars import grammar_of_calls
from engine.text.tool_calls.json_text import parameters_of
from engine.text.tool_calls.marks import AnswerPartEvent, CallBegun, CallText, PartText
from engine.text.tool_calls.parser import AnswerParser
from engine.text.tool_calls.turns import NO_PARAMETERS
from engine.util.progress import IsCancelled

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Matcher
    from engine.generation.constrained import Constraints
    from engine.generation.prompts import Prompts
    from engine.generation.requests import Generate
    from engine.generation.sequence import StepResult, Steps
    from engine.text.messages import ChatMessage, Tool

N_TAIL = 64
"""Number of tokens at the end of a prompt in which it may open a thought."""


class AnswerReading:
    """Reading of one answer.

    Args:
        tools: functions that it may call.
        is_single: whether it ends behind its first whole call.

    Attributes:
        parser: parser of the answer, once `begin` or `go_on` was called.
        told: text that the parser holds back, but that an earlier part of the answer has told.
    """

    parser: AnswerParser
    told = ""

    def __init__(self, prompts: Prompts, tools: Sequence[Tool], *, is_single: bool = False) -> None:
        self._tokenizer = prompts.tokenizer
        self._form = prompts.template_use.form
        self._marks = prompts.control_marks
        self._types = {tool.name: parameters_of(tool.parameters) for tool in tools} or None
        self._is_single = is_single

    @property
    def shown(self) -> Collection[int]:
        """Control tokens that are marks of the form, so that their text is read."""
        return self._marks.keys()

    def begin(self, ids: Sequence[int]) -> None:
        """Read an answer to a prompt from its beginning on."""
        self.parser = self._parser(self._tokenizer.decode(ids[-N_TAIL:]))

    def go_on(
        self, message: ChatMessage, question: str, ids: Sequence[int], text: str
    ) -> tuple[tuple[int, ...], str]:
        """Read on behind an answer's first part; return its tokens and text as they were computed.

        Args:
            message: the answer so far.
            question: prompt of the answer.
            ids: tokens that it is said to consist of; they are used if they make what it says.
            text: text of the answer behind the prompt, in place of tokens.
        """
        spelled = ""
        if ids and all(0 <= token < self._tokenizer.n_vocab for token in ids):
            decoder = self._tokenizer.stream(shown=self.shown)
            spelled = "".join(map(decoder.feed, ids))
        wanted = message.reasoning, message.content
        for is_cut in (False, True) if spelled else ():
            if self._follow(question, spelled, is_cut=is_cut) == wanted:
                return tuple(ids), spelled
        self._follow(question, text)
        return (), text

    def _follow(self, question: str, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        """Read on behind a text; return what it thinks and says.

        Args:
            is_cut: whether the text was told as that of an answer that is cut off.
        """
        self.parser = self._parser(question)
        known = self.parser.feed(text)
        ended = self._parser(question)
        whole = [*ended.feed(text), *ended.end(is_cut=is_cut)]
        self.told = _of(whole, "reasoning")[len(_of(known, "reasoning")) :]
        self.told += _of(whole, "content")[len(_of(known, "content")) :]
        return _of(whole, "reasoning"), _of(whole, "content")

    def _parser(self, prompt: str) -> AnswerParser:
        return AnswerParser(
            self._form,
            self._types,
            prompt,
            tuple(self._marks.values()),
            is_single=self._is_single,
        )


def _of(events: Sequence[AnswerPartEvent], part: str) -> str:
    return "".join(e.text for e in events if isinstance(e, PartText) and e.part == part)


def in_parts(steps: Steps, parser: AnswerParser, told: str = "") -> Steps:
    """Yield the steps of an answer with its text in parts; each token is told once as before.

    Args:
        told: text that the parser holds back, but that an earlier part of the answer has told.
    """
    events = _PartEvents(parser, told)
    found: StepResult | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return
        found = None
        if isinstance(step, TokenText):
            yield from events.of(step)
        elif isinstance(step, Finished):
            yield from events.end(is_cut=step.reason != "stop")
            yield step
        else:
            found = yield step


class _PartEvents:
    """Events of the parts of one answer, and the tokens that no event has told yet."""

    def __init__(self, parser: AnswerParser, told: str) -> None:
        self._parser = parser
        self._held = told
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def of(self, text: TokenText) -> Iterator[GenerationEvent]:
        """Yield what more text makes known."""
        self._ids += text.ids
        self._logprobs += text.logprobs
        yield from self._told(self._parser.feed(text.text))

    def end(self, *, is_cut: bool) -> Iterator[GenerationEvent]:
        """Yield what was held back; see `AnswerParser.end`."""
        yield from self._told(self._parser.end(is_cut=is_cut))
        if self._ids:
            yield self._text(PartText("content", ""))

    def _told(self, parts: Sequence[AnswerPartEvent]) -> Iterator[GenerationEvent]:
        if parts and not any(isinstance(part, PartText) for part in parts) and self._ids:
            yield self._text(PartText("content", ""))
        for part in parts:
            if isinstance(part, PartText):
                yield self._text(self._untold(part))
            elif isinstance(part, CallBegun):
                yield ToolCallBegun(part.index, new_call_id(), part.name)
            elif isinstance(part, CallText):
                yield ToolCallText(part.index, part.text)
            else:
                yield ToolCallEnded(part.index, part.is_whole)

    def _untold(self, part: PartText) -> PartText:
        """Return a text without what has been told of it before."""
        n = 0
        while n < min(len(self._held), len(part.text)) and self._held[n] == part.text[n]:
            n += 1
        self._held = self._held[n:] if n == len(part.text) else ""
        return PartText(part.part, part.text[n:])

    def _text(self, part: PartText) -> TokenText:
        event = TokenText(part.text, tuple(self._ids), part.part, tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return event


def new_call_id() -> str:
    """Return a name for a call: nine letters and digits, as the strictest templates want them."""
    return secrets.token_hex(5)[:9]


def in_text(steps: Steps, before: ChatMessage | None) -> Steps:
    """Yield the steps of an answer in parts with its thought as text between marks.

    Args:
        before: first part of an answer that goes on, with its thought apart; None for a new one.
    """
    marker = marker_behind(before)
    found: StepResult | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return
        found = None
        if isinstance(step, TokenText):
            text = marker.written(step.text, is_thought=step.part == "reasoning")
            yield replace(step, text=text, part="content")
        else:
            found = yield step


def marker_behind(before: ChatMessage | None) -> ThoughtMarker:
    """Return what marks the thought of an answer that goes on behind its first part, if any."""
    if before is None:
        return ThoughtMarker()
    has_said = bool(before.content)
    return ThoughtMarker(is_open=bool(before.reasoning) and not has_said, has_said=has_said)


def thought_apart(message: ChatMessage) -> ChatMessage:
    """Return an answer whose thought, which stands in its text between marks, is apart."""
    start = message.content.lstrip()
    if message.reasoning or not start.startswith(THINK_OPEN):
        return message
    thought, _, said = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return replace(message, reasoning=thought.strip(), content=said.lstrip())


log = logging.getLogger(__name__)


class WantedForm(NamedTuple):
    """The form that an answer must have.

    Attributes:
        matcher: matcher of the grammar; None where any answer will do.
        marks: marks of the thinking behind which it begins; None for those of the template.
    """

    matcher: Matcher | None
    marks: ThinkingMarks | None = None


def wanted_form(
    prompts: Prompts, constraints: Constraints, request: Generate, is_cancelled: IsCancelled
) -> WantedForm:
    """Return the form that the answer to a conversation must have.

    Where the model is to choose whether it calls a function, the schema of one may be beyond what
    grammars can say; then nothing holds it to the schema.

    Raises:
        GrammarError: the grammar that is asked for cannot be used.
        PromptError: the function that must be called is none that can be.
        Cancelled: `is_cancelled` has returned True.
    """
    tools, choice = callable_tools(request), request.tool_choice
    own = request.grammar or request.sampling.form
    if not tools or (choice == "auto" and own):
        return WantedForm(constraints.checked(own, own, is_cancelled) if own else None)
    form = prompts.template_use.form
    tokens = {text: token for token, text in prompts.control_marks.items()}
    grammar = grammar_of_calls(form, tools, tokens, choice)
    as_text = grammar_of_calls(form, tools, {}, choice)
    marks = form.thinking_marks if thinking_marks(prompts.template.source) else None
    try:
        return WantedForm(constraints.checked(grammar, as_text, is_cancelled), marks)
    except Cancelled:
        raise
    except EngineError as error:
        if choice != "auto":
            _check_parameters(tools, is_cancelled)
            raise PromptError(
                f"No call can be required of these functions. {error}", "Simplify their schemas."
            ) from error
        log.info("calls are not held to the schemas of their functions: %s", error)
        return WantedForm(None)


def _check_parameters(tools: Sequence[Tool], is_cancelled: IsCancelled) -> None:
    """Check the schemas of functions one by one.

    Raises:
        ToolError: one cannot be used; unlike an error of the grammar that is made of all of
            them, it names the function and the place in its schema.
    """
    for tool in tools:
        try:
            schema = Grammar("json_schema", tool.parameters or NO_PARAMETERS)
            check_grammar(schema, is_cancelled)
        except GrammarError as error:
            raise ToolError(
                f"The parameters of the function {tool.name} cannot be used. {error}",
                tool.name,
                "Correct them, or leave tool_choice open.",
            ) from error


def callable_tools(request: Generate) -> Sequence[Tool]:
    """Return the functions that an answer may call.

    Raises:
        PromptError: it must call one that there is not.
    """
    choice = request.tool_choice
    if choice == "none":
        return ()
    if choice.startswith("=") and choice[1:] not in {tool.name for tool in request.tools}:
        raise PromptError(f"There is no function {choice[1:]} to call.", "Name one of the tools.")
    if choice == "required" and not request.tools:
        raise PromptError("There is no function to call.", "Give the request tools.")
    return request.tools
