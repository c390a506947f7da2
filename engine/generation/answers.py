"""Answers of one model to prompts and chats, as steps to be computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from engine.errors import ContextOverflow, EngineError, PromptError
from engine.generation.answer_parts import (
    AnswerReading,
    WantedForm,
    callable_tools,
    in_parts,
    in_text,
    thought_apart,
    wanted_form,
)
from engine.generation.constrained import Constraints
from engine.generation.generate import Generation, check_n_logprobs, fitting_tokens
from engine.generation.prompts import PromptOptions
from engine.generation.results import ContextShifted
from engine.generation.sequence import in_background
from engine.text.messages import THINK_OPEN, text_size, thinking_marks
from engine.vision.images.placed import PlacedImages, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Matcher
    from engine.generation.constrained import AnswerConstraint
    from engine.generation.image_prompts import Seen
    from engine.generation.prompts import Prompt, Prompts
    from engine.generation.requests import Generate
    from engine.generation.sequence import Preparing, Steps
    from engine.sampling_params import Grammar, SamplingParams
    from engine.text.messages import ChatMessage

T = TypeVar("T")

MAX_AT_ONCE = 1 << 14
"""Number of characters up to which a text is tokenised where answers are computed: it takes them no
longer than a step, and a thread would take longer to start on it."""


class Answers:
    """Maker of the answers of one model; they hold nothing of the model but its prompts.

    Args:
        n_ctx: size of the context in tokens.
        is_marked: whether it matters where prompts of the same chat may part, see `Prompt.marks`.
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

    def to(self, request: Generate) -> Steps:
        """Answer a `Generate` command."""
        return self._chat(request) if request.prompt is None else self._completed(request)

    def _matcher(self, grammar: Grammar | None) -> Preparing[Matcher | None]:
        """Return the matcher of a grammar, which is checked and compiled in the background."""
        if grammar is None:
            return None
        return (yield from in_background(partial(self._constraints.checked, grammar, grammar)))

    def _read_pictures(self, messages: Sequence[ChatMessage]) -> Preparing[Seen]:
        reader = self._prompts.pictures
        if reader is None or not any(message.pictures for message in messages):
            return ()
        return (yield from in_background(partial(reader.read, messages)))

    def _completed(self, request: Generate) -> Steps:
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

    def _chat(self, request: Generate) -> Steps:
        """Answer a conversation."""
        if request.suffix:
            raise PromptError("A suffix goes with a prompt, not with messages.")
        tools, messages = callable_tools(request), request.messages
        wanted = WantedForm(None)
        if tools or request.grammar or request.sampling.form:
            wanted = yield from in_background(
                partial(wanted_form, self._prompts, self._constraints, request)
            )
        reading = None
        if request.in_parts:
            is_single = not request.parallel_tool_calls
            reading = AnswerReading(self._prompts, tools, is_single=is_single)
        elif self._has_other_marks:
            reading = AnswerReading(self._prompts, ())
            if request.continue_last and messages:
                messages = (*messages[:-1], thought_apart(messages[-1]))
        stops = self._prompts.template.stop_strings  # a plain template has no end token of its own
        sampling = replace(request.sampling, stop=(*request.sampling.stop, *stops))
        _ = yield from self._read_pictures(messages)  # held for the prompt
        wishes = PromptOptions.of(request.thinks, request.effort, request.variables, tools)

        def make() -> tuple[tuple[int, ...], str, Prompt]:
            begun, said = self._begun(request, messages, wishes, sampling.stop, reading)
            prompt = self._prompts.chat(
                messages, self._n_ctx, continue_last=request.continue_last,
                is_shortened=request.sampling.on_overflow == "shift", begun=begun, wishes=wishes,
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
            self._constraints.of, wanted.matcher, text, begun, said, thinks=request.thinks,
            marks=wanted.marks,
        )  # fmt: skip
        if wanted.matcher and (begun or said):  # which may be long
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
        steps = in_parts(steps, reading.parser, reading.told)
        last = messages[-1] if request.continue_last else None
        yield from steps if request.in_parts else in_text(steps, last)

    @cached_property
    def _has_other_marks(self) -> bool:
        """Whether the model marks its thoughts otherwise than most do."""
        marks = thinking_marks(self._prompts.template.source)
        return marks is not None and marks.opening != THINK_OPEN

    def _begun(
        self, request: Generate, messages: Sequence[ChatMessage], wishes: PromptOptions,
        stops: Sequence[str], reading: AnswerReading | None,
    ) -> tuple[tuple[int, ...], str]:  # fmt: skip
        """Return the tokens and the text that an answer which is continued has had so far."""
        if not request.continue_last or not messages:
            return (), ""
        *before, last = messages
        if reading is None:
            tokenizer = self._prompts.tokenizer
            return fitting_tokens(request.begun, last.content, tokenizer, stops), last.content
        question = self._prompts.written(before, wishes=wishes) if before else ""
        text = self._prompts.template_use.continuation(last, question)
        return reading.go_on(last, question, request.begun, text)

    def _run(
        self, prompt: Prompt, params: SamplingParams, timed_every: int, begun: Sequence[int] = (),
        said: str = "", n_logprobs: int | None = None, shown: Collection[int] = (),
        constraint: AnswerConstraint | None = None, reading: AnswerReading | None = None,
    ) -> Steps:  # fmt: skip
        if timed_every < 0:
            raise EngineError("Tokens cannot be timed at a negative interval.", "Use 0 for none.")
        if n_logprobs is not None:
            check_n_logprobs(n_logprobs)
        generation = Generation(
            self._n_ctx, self._prompts.found, params, prompt.n_keep, timed_every, begun, said,
            n_logprobs, shown, constraint, reading,
        )  # fmt: skip
        pictures = PlacedImages(prompt.ids, prompt.pictures)
        yield from generation.run(prompt.ids, prompt.marks, pictures)


def _made(given: object, make: Callable[[], T]) -> Preparing[T]:
    """Return what is made of texts, on a thread if they are long."""
    if text_size(given) <= MAX_AT_ONCE:
        return make()
    return (yield from in_background(lambda _: make()))
