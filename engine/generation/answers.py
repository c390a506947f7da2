"""A model's answers to prompts and chats, as steps to compute."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from engine.errors import ContextOverflow, EngineError, PromptError
from engine.generation.generate import Generation, check_n_logprobs, fitting_tokens
from engine.generation.prompts import PromptOptions
from engine.generation.results import (
    ContextShifted,
    Finished,
    GenerationEvent,
    TokenLogprob,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from engine.generation.sequence import in_background
from engine.generation.structured_output import (
    AnswerGrammar,
    Constraints,
    callable_tools,
    output_format,
)
from engine.text.messages import THINK_OPEN, ThoughtMarker, text_size, thinking_marks, thought_apart
from engine.text.tool_calls.json_text import parameters_of
from engine.text.tool_calls.marks import AnswerPartEvent, CallBegun, CallText, PartText
from engine.text.tool_calls.parser import AnswerParser
from engine.vision.images.placed import PlacedImages, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Matcher
    from engine.generation.image_prompts import PromptImages
    from engine.generation.prompts import Prompt, Prompts
    from engine.generation.requests import AnswerRequest
    from engine.generation.sequence import Preparing, StepResult, Steps
    from engine.generation.structured_output import AnswerConstraint
    from engine.sampling_params import Grammar, SamplingParams
    from engine.text.messages import ChatMessage, Tool

N_TAIL = 64
"""Number of tokens at the end of a prompt in which to look for an open thinking block."""


class AnswerReading:
    """Parsing of one answer.

    Args:
        tools: functions that the answer may call.
        is_single: whether the answer ends after its first complete call.

    Attributes:
        parser: parser of the answer, set by `begin` or `go_on`.
        sent: text that the parser holds back although it was sent with an earlier part.
    """

    parser: AnswerParser
    sent = ""

    def __init__(self, prompts: Prompts, tools: Sequence[Tool], *, is_single: bool = False) -> None:
        self._tokenizer = prompts.tokenizer
        self._form = prompts.template_use.form
        self._marks = prompts.control_marks
        self._types = {tool.name: parameters_of(tool.parameters) for tool in tools} or None
        self._is_single = is_single

    @property
    def shown(self) -> Collection[int]:
        """Control tokens that are marks in the output format, so that their text is parsed."""
        return self._marks.keys()

    def is_over(self) -> bool:
        """Return whether no more of the answer is needed."""
        return self.parser.is_over

    def begin(self, ids: Sequence[int]) -> None:
        """Start parsing a new answer to a prompt."""
        self.parser = self._parser(self._tokenizer.decode(ids[-N_TAIL:]))

    def go_on(
        self, message: ChatMessage, question: str, ids: Sequence[int], text: str
    ) -> tuple[tuple[int, ...], str]:
        """Parse an answer up to where generation will resume; return its tokens and text so far.

        Args:
            message: the answer so far.
            question: prompt that it answers.
            ids: supposed tokens of the answer, used if they spell its text.
            text: text of the answer after the prompt, used otherwise.
        """
        spelled = ""
        if ids and all(0 <= token < self._tokenizer.n_vocab for token in ids):
            decoder = self._tokenizer.stream(shown=self.shown)
            spelled = "".join(map(decoder.feed, ids))
        expected = message.reasoning, message.content
        for is_cut in (False, True) if spelled else ():
            if self._follow(question, spelled, is_cut=is_cut) == expected:
                return tuple(ids), spelled
        self._follow(question, text)
        return (), text

    def _follow(self, question: str, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        self.parser = self._parser(question)
        known = self.parser.feed(text)
        ended = self._parser(question)
        whole = [*ended.feed(text), *ended.end(is_cut=is_cut)]
        self.sent = _of(whole, "reasoning")[len(_of(known, "reasoning")) :]
        self.sent += _of(whole, "content")[len(_of(known, "content")) :]
        return _of(whole, "reasoning"), _of(whole, "content")

    def _parser(self, prompt: str) -> AnswerParser:
        return AnswerParser(
            self._form, self._types, prompt, tuple(self._marks.values()), is_single=self._is_single
        )


def _of(events: Sequence[AnswerPartEvent], part: str) -> str:
    return "".join(e.text for e in events if isinstance(e, PartText) and e.part == part)


def _changed(
    steps: Steps, change: Callable[[TokenText | Finished], Iterator[GenerationEvent]]
) -> Steps:
    result: StepResult | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration:
            return
        result = None
        if isinstance(step, TokenText | Finished):
            yield from change(step)
        else:
            result = yield step


def in_parts(steps: Steps, parser: AnswerParser, sent: str = "") -> Steps:
    """Yield an answer's steps with its text in parts; each token is still sent once.

    Args:
        sent: see `AnswerReading`.
    """
    events = _PartEvents(parser, sent)

    def parts(event: TokenText | Finished) -> Iterator[GenerationEvent]:
        if isinstance(event, TokenText):
            yield from events.of(event)
        else:
            yield from events.end(is_cut=event.reason != "stop")
            yield event

    return _changed(steps, parts)


class _PartEvents:
    """Events for the parts of one answer, and its unsent tokens."""

    def __init__(self, parser: AnswerParser, sent: str) -> None:
        self._parser = parser
        self._held = sent
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def of(self, text: TokenText) -> Iterator[GenerationEvent]:
        self._ids += text.ids
        self._logprobs += text.logprobs
        yield from self._events(self._parser.feed(text.text))

    def end(self, *, is_cut: bool) -> Iterator[GenerationEvent]:
        yield from self._events(self._parser.end(is_cut=is_cut))
        if self._ids:
            yield self._text(PartText("content", ""))

    def _events(self, parts: Sequence[AnswerPartEvent]) -> Iterator[GenerationEvent]:
        if parts and not any(isinstance(part, PartText) for part in parts) and self._ids:
            yield self._text(PartText("content", ""))
        for part in parts:
            if isinstance(part, PartText):
                yield self._text(self._unsent(part))
            elif isinstance(part, CallBegun):
                yield ToolCallBegun(part.index, new_call_id(), part.name)
            elif isinstance(part, CallText):
                yield ToolCallText(part.index, part.text)
            else:
                yield ToolCallEnded(part.index, part.is_whole)

    def _unsent(self, part: PartText) -> PartText:
        """Return a text without the beginning that was already sent."""
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
    """Return an id for a call: nine letters and digits, as the strictest templates require."""
    return secrets.token_hex(5)[:9]


def in_text(steps: Steps, before: ChatMessage | None) -> Steps:
    """Yield the steps of an answer in parts, writing its thinking as text between marks.

    Args:
        before: first part of an answer to continue, with separate thinking; None for a new one.
    """
    marker = marker_behind(before)

    def marked(event: TokenText | Finished) -> Iterator[GenerationEvent]:
        if isinstance(event, TokenText):
            text = marker.written(event.text, is_thought=event.part == "reasoning")
            event = replace(event, text=text, part="content")
        yield event

    return _changed(steps, marked)


def marker_behind(before: ChatMessage | None) -> ThoughtMarker:
    """Return the marker for the thinking in an answer, which may be a continued one."""
    if before is None:
        return ThoughtMarker()
    has_said = bool(before.content)
    return ThoughtMarker(is_open=bool(before.reasoning) and not has_said, has_said=has_said)


T = TypeVar("T")

MAX_INLINE = 1 << 14
"""Maximum number of characters to tokenize on the engine thread; that takes no longer than a step,
and less time than starting a thread."""


class Answers:
    """Builder of one model's answers; needs only the model's prompts.

    Args:
        n_ctx: context size in tokens.
        is_marked: whether to find `Prompt.marks`.
    """

    def __init__(self, prompts: Prompts, n_ctx: int, *, is_marked: bool) -> None:
        self._prompts, self._n_ctx, self._is_marked = prompts, n_ctx, is_marked
        self._constraints = Constraints(prompts)

    def plain(self, prompt: str | Sequence[int], params: SamplingParams, timed_every: int) -> Steps:
        """Continue a text or token ids; see `Model.generate`."""
        matcher = yield from self._matcher(params.form)
        plain = yield from _made(prompt, lambda: self._prompts.plain(prompt, self._n_ctx))
        constraint = self._constraints.of(matcher, plain.ids, is_chat=False)
        yield from self._run(plain, params, timed_every, constraint=constraint)

    def to(self, request: AnswerRequest) -> Steps:
        """Answer an `AnswerRequest` command."""
        return self._chat(request) if request.prompt is None else self._completed(request)

    def _matcher(self, grammar: Grammar | None) -> Preparing[Matcher | None]:
        if grammar is None:
            return None
        return (yield from in_background(partial(self._constraints.checked, grammar, grammar)))

    def _read_images(self, messages: Sequence[ChatMessage]) -> Preparing[PromptImages]:
        reader = self._prompts.image_reader
        if reader is None or not any(message.pictures for message in messages):
            return ()
        return (yield from in_background(partial(reader.read, messages)))

    def _completed(self, request: AnswerRequest) -> Steps:
        assert request.prompt is not None
        matcher = yield from self._matcher(request.grammar or request.sampling.form)
        prompt, suffix, n_ctx = request.prompt, request.suffix, self._n_ctx
        if suffix:
            plain = yield from _made(
                (prompt, suffix), lambda: self._prompts.fill_in(prompt, suffix, n_ctx)
            )
        else:
            plain = yield from _made(prompt, lambda: self._prompts.plain(prompt, n_ctx))
        constraint = self._constraints.of(matcher, plain.ids, is_chat=False)
        yield from self._run(
            plain,
            request.sampling,
            request.timed_every,
            n_logprobs=request.n_logprobs,
            constraint=constraint,
        )

    def _chat(self, request: AnswerRequest) -> Steps:
        if request.suffix:
            raise PromptError("A suffix can only be used with a prompt, not with messages.")
        tools, messages = callable_tools(request), request.messages
        grammar = AnswerGrammar(None)
        if tools or request.grammar or request.sampling.form:
            grammar = yield from in_background(
                partial(output_format, self._prompts, self._constraints, request)
            )
        reading = None
        if request.in_parts:
            is_single = not request.parallel_tool_calls
            reading = AnswerReading(self._prompts, tools, is_single=is_single)
        elif self._has_other_marks:
            reading = AnswerReading(self._prompts, ())
            if request.continue_last and messages:
                messages = (*messages[:-1], thought_apart(messages[-1]))
        stops = self._prompts.template.stop_strings  # a plain template has no end token
        sampling = replace(request.sampling, stop=(*request.sampling.stop, *stops))
        _ = yield from self._read_images(messages)  # cached for the prompt
        options = PromptOptions.of(request.thinks, request.effort, request.variables, tools)

        def make() -> tuple[tuple[int, ...], str, Prompt]:
            begun, said = self._begun(request, messages, options, sampling.stop, reading)
            prompt = self._prompts.chat(
                messages, self._n_ctx, continue_last=request.continue_last,
                is_shortened=request.sampling.on_overflow == "shift", begun=begun, options=options,
                is_marked=self._is_marked,
            )  # fmt: skip
            return begun, said, prompt

        begun, said, prompt = yield from _made((messages, tools, request.variables), make)
        if prompt.n_dropped:
            yield ContextShifted(prompt.n_dropped)
        if (n_tokens := len(prompt.ids)) > self._n_ctx:
            raise ContextOverflow(n_tokens, self._n_ctx, n_tokens)
        shown = reading.shown if reading else ()
        text = text_ids(prompt.ids)
        constrained = partial(
            self._constraints.of, grammar.matcher, text, begun, said, thinks=request.thinks,
            marks=grammar.marks,
        )  # fmt: skip
        if grammar.matcher and (begun or said):  # the earlier part may be long
            constraint = yield from in_background(lambda _: constrained())
        else:
            constraint = constrained()
        steps = self._run(
            prompt,
            sampling,
            request.timed_every,
            begun,
            said,
            request.n_logprobs,
            shown,
            constraint,
            reading,
        )
        if reading is None:
            yield from steps
            return
        if not request.continue_last:
            reading.begin(text)
        steps = in_parts(steps, reading.parser, reading.sent)
        last = messages[-1] if request.continue_last else None
        yield from steps if request.in_parts else in_text(steps, last)

    @cached_property
    def _has_other_marks(self) -> bool:
        """Whether the model's thinking marks differ from the usual ones."""
        marks = thinking_marks(self._prompts.template.source)
        return marks is not None and marks.opening != THINK_OPEN

    def _begun(
        self, request: AnswerRequest, messages: Sequence[ChatMessage], options: PromptOptions,
        stops: Sequence[str], reading: AnswerReading | None,
    ) -> tuple[tuple[int, ...], str]:  # fmt: skip
        if not request.continue_last or not messages:
            return (), ""
        *before, last = messages
        if reading is None:
            tokenizer = self._prompts.tokenizer
            return fitting_tokens(request.begun, last.content, tokenizer, stops), last.content
        question = self._prompts.written(before, options=options) if before else ""
        text = self._prompts.template_use.continuation(last, question)
        return reading.go_on(last, question, request.begun, text)

    def _run(
        self, prompt: Prompt, params: SamplingParams, timed_every: int, begun: Sequence[int] = (),
        said: str = "", n_logprobs: int | None = None, shown: Collection[int] = (),
        constraint: AnswerConstraint | None = None, reading: AnswerReading | None = None,
    ) -> Steps:  # fmt: skip
        if timed_every < 0:
            raise EngineError(
                "Tokens cannot be timed at a negative interval.", "Use 0 to turn timing off."
            )
        if n_logprobs is not None:
            check_n_logprobs(n_logprobs)
        generation = Generation(
            self._n_ctx, self._prompts.found, params, prompt.n_keep, timed_every, begun, said,
            n_logprobs, shown, constraint, reading.is_over if reading else lambda: False,
        )  # fmt: skip
        images = PlacedImages(prompt.ids, prompt.images)
        yield from generation.run(prompt.ids, prompt.marks, images)


def _made(given: object, make: Callable[[], T]) -> Preparing[T]:
    if text_size(given) <= MAX_INLINE:
        return make()
    return (yield from in_background(lambda _: make()))
