"""Structured output: an answer's grammar, and the tokens that it allows next."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.decoding.grammar.checker import check_grammar
from engine.decoding.grammar.matcher import Mask, MaskVocabulary, Matcher
from engine.decoding.grammar.schema import (
    DRAFTED_MASK_SECONDS,
    MAX_MASK_SECONDS,
    USUAL_MASK_SECONDS,
)
from engine.errors import Cancelled, EngineError, GrammarError, PromptError, ToolError
from engine.sampling_params import Grammar
from engine.text.messages import thinking_marks, thinking_state
from engine.text.tool_calls.grammars import grammar_of_calls
from engine.text.tool_calls.marks import AnswerMark
from engine.text.tool_calls.turns import NO_PARAMETERS
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits
    from engine.generation.prompts import Prompts
    from engine.generation.requests import AnswerRequest
    from engine.text.messages import ThinkingMarks, ThinkingState, Tool

log = logging.getLogger(__name__)

GAP = b"\n\n"
"""Line breaks that models may write between a mark and the constrained text."""


@dataclass(frozen=True, slots=True)
class ConstraintState:
    """State of a constrained answer: its progress, and the text that may follow.

    Attributes:
        waits: texts that must appear, in this order, before the grammar applies; anything may stand
            before and between them.
        tail: end of the text so far, in which the first of `waits` may have started.
        n_opening: number of bytes of the thinking's opening mark that the answer has started with;
            None if thinking can no longer start.
        gap: line breaks that are still allowed before the constrained text.
        matcher: state of the grammar; None if the text is a part of the opening mark that the
            grammar does not allow.
        n: number of tokens that the matcher has accepted.
        lead: first tokens of the answer as long as they may become the grammar's lead; None once
            that is decided.
    """

    waits: tuple[bytes, ...] = ()
    tail: bytes = b""
    n_opening: int | None = None
    gap: bytes = b""
    matcher: Matcher | None = None
    n: int = 0
    lead: tuple[int, ...] | None = None


FREE = ConstraintState()
"""State of an answer that turned out to be unconstrained."""


class AnswerConstraint:
    """Constraint on one answer, with its progress.

    The grammar applies directly after thinking ends, or after its trigger if it has one; with a
    trigger, it may apply any number of times. With a lead, it applies from the start of the answer,
    but only if the answer starts with the lead.

    Args:
        grammar: matcher of the grammar, at its start.
        marks: marks of the model's thinking; None if it does not think.
        thinking: whether the answer starts inside a thinking block.

    Attributes:
        is_slow: whether the last mask took so long that a pass should not compute several.
    """

    def __init__(
        self, vocabulary: MaskVocabulary, grammar: Matcher, marks: ThinkingMarks | None = None,
        thinking: ThinkingState = "over",
    ) -> None:  # fmt: skip
        self._vocabulary, self._fresh = vocabulary, grammar
        self._opening = marks.opening.encode() if marks else b""
        closing = tuple(text.encode() for text in marks.closing) if marks else ()
        self._trigger = (grammar.trigger.encode(),) if grammar.trigger else ()
        self._after_thought = closing + self._trigger
        self._lead = AnswerMark(grammar.lead) if grammar.lead else None
        state = ConstraintState(waits=self._after_thought if thinking == "open" else self._trigger)
        if not state.waits and self._lead:
            state = ConstraintState(lead=())
        elif not state.waits:
            n_opening = 0 if thinking == "possible" else None
            state = ConstraintState(n_opening=n_opening, matcher=self._fresh.copy())
        self._state = state
        self._before: list[ConstraintState] = []
        self.is_slow = False
        self._spent = self._seconds = 0.0  # processor time; see `_metered`

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, so that nothing may follow."""
        matcher = self._state.matcher
        is_lazy = self._trigger or self._lead
        return not is_lazy and matcher is not None and matcher.is_over

    def restrict(self, logits: Logits, ends: Collection[int]) -> None:
        """Set to -inf the logits of all tokens that are not allowed next.

        Args:
            ends: tokens that end the answer.

        Raises:
            GrammarError: the grammar has become too complex, or takes too long.
        """
        mask = self.allowed(ends)
        logits[mask.size :] = -np.inf
        logits[: mask.size][~mask] = -np.inf

    def allowed(self, ends: Collection[int]) -> Mask:
        """Return the mask of tokens that are allowed next; see `restrict`."""
        with self._metered():
            mask = self._mask()
        self.is_slow = self._spent > DRAFTED_MASK_SECONDS
        mask[[token for token in self._vocabulary.eog_ids if token not in ends]] = False
        return mask

    def accept(self, token: int) -> None:
        """Accept the next token of the answer.

        Raises:
            GrammarError: the token is not allowed, or the grammar takes too long.
        """
        with self._metered():
            self._before.append(self._state)
            self._state = self._after(self._vocabulary.bytes_of(token), token)

    def accept_text(self, text: str) -> None:
        """Accept the start of an answer whose tokens are unknown; see `accept`."""
        for token in self._vocabulary.encode(text.encode()):
            self.accept(token)

    def take_back(self, n: int) -> None:
        """Roll back the last n tokens."""
        self._state = self._before[-n]
        del self._before[-n:]
        if self._state.matcher is not None:
            self._state.matcher.rewind(self._state.n)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Add up excess CPU time in the `with` block, as other answers wait for it."""
        if self._seconds > MAX_MASK_SECONDS:
            raise GrammarError(
                "The answer cannot be continued: its output format takes too long to check.",
                hint="Use a grammar that parses each text in only one way.",
            )
        begun = time.thread_time()
        try:
            yield
        finally:
            self._spent = time.thread_time() - begun
            self._seconds += max(0.0, self._spent - USUAL_MASK_SECONDS)

    # masks

    def _mask(self) -> Mask:
        state = self._state
        if state.waits:
            return self._free(state)
        if state == FREE or state.lead is not None:
            return np.ones(self._vocabulary.n, np.bool_)
        mask = np.zeros(self._vocabulary.n, np.bool_)
        if state.matcher is not None:
            mask |= state.matcher.allowed()
        if state.n_opening is not None:
            mask[self._opening_pieces(state.n_opening)] = True
        mask[self._line_breaks(state.gap)] = True
        return mask

    def _free(self, state: ConstraintState) -> Mask:
        """Return the tokens allowed before the grammar applies."""
        mask = np.ones(self._vocabulary.n, np.bool_)
        if state.waits != self._trigger:
            mask[self._vocabulary.eog_ids] = False
        if len(state.waits) == 1:
            mask[self._too_long(state.tail, state.waits[0])] = False
        return mask

    def _too_long(self, tail: bytes, mark: bytes) -> list[int]:
        found = self._vocabulary.beyond(mark)
        for n in range(len(mark)):
            if tail.endswith(mark[:n]):
                rest = mark[n:]
                longer = self._vocabulary.longer_than(rest)
                found = found + [i for text, i in longer if text[len(rest) :] not in (b"\n", GAP)]
        return found

    def _opening_pieces(self, n: int) -> list[int]:
        rest, found = self._opening[n:], self._vocabulary.with_bytes
        ends = [token for size in range(len(GAP) + 1) for token in found(rest + GAP[:size])]
        if found(rest):
            return ends
        return ends + [token for size in range(1, len(rest)) for token in found(rest[:size])]

    def _line_breaks(self, gap: bytes) -> list[int]:
        sizes = range(1, len(gap) + 1)
        return [token for size in sizes for token in self._vocabulary.with_bytes(gap[:size])]

    # transitions

    def _after(self, text: bytes, token: int) -> ConstraintState:
        state = self._state
        if state.waits:
            return self._searched(state, text)
        if state.lead is not None:
            return self._led((*state.lead, token))
        if state == FREE:
            return FREE
        matcher = state.matcher
        if text and state.gap.startswith(text) and not (matcher and matcher.can_accept(token)):
            return replace(state, gap=state.gap[len(text) :])
        if state.n_opening is None:
            return self._matched(state, token)
        return self._opened(state, state.n_opening, text, token)

    def _searched(self, state: ConstraintState, text: bytes) -> ConstraintState:
        waits, text = state.waits, state.tail + text
        while waits and waits[0] in text:
            text = text[text.index(waits[0]) + len(waits[0]) :]
            waits = waits[1:]
        if waits:
            n_tail = len(waits[0]) - 1
            return ConstraintState(waits=waits, tail=text[max(0, len(text) - n_tail) :])
        if self._lead:
            return self._led(tuple(self._vocabulary.encode(text)))
        begun = ConstraintState(matcher=self._fresh.copy())
        if GAP.startswith(text):
            return replace(begun, gap=GAP[len(text) :])
        for token in self._vocabulary.encode(text):  # tokens that were not constrained until now
            begun = self._matched(begun, token)
        return begun

    def _led(self, tokens: tuple[int, ...]) -> ConstraintState:
        """Return the state after an answer's first tokens, which may form the lead."""
        assert self._lead is not None, "only a grammar with a lead waits for it"
        said = b"".join(map(self._vocabulary.bytes_of, tokens)).lstrip()
        text, opening = said.decode("utf-8", "replace"), self._opening.decode()
        if opening and text.startswith(opening):
            rest = said.removeprefix(self._opening)
            return self._searched(ConstraintState(waits=self._after_thought), rest)
        found, held = self._lead.find(text, 0)
        if (found is None and held == 0) or (opening and opening.startswith(text)):
            return ConstraintState(lead=tokens)
        if found is None or found.start():
            return FREE
        state = ConstraintState(matcher=self._fresh.copy())
        for token in tokens:
            if state.matcher is None or not state.matcher.can_accept(token):
                return FREE
            state = self._matched(state, token)
        return state

    def _matched(self, state: ConstraintState, token: int) -> ConstraintState:
        matcher = state.matcher
        assert matcher is not None, "other tokens are not allowed"
        matcher.accept(token)
        if self._trigger and matcher.is_over:
            return ConstraintState(waits=self._trigger)
        if self._lead and matcher.is_over:
            return FREE
        return ConstraintState(matcher=matcher, n=matcher.n)

    def _opened(self, state: ConstraintState, n: int, text: bytes, token: int) -> ConstraintState:
        rest = self._opening[n:]
        if text.startswith(rest):
            return self._searched(ConstraintState(waits=self._after_thought), text[len(rest) :])
        if not text or not rest.startswith(text):
            return self._matched(state, token)
        matcher = state.matcher
        if matcher is None or not matcher.can_accept(token):
            return ConstraintState(n_opening=n + len(text))
        matcher.accept(token)
        return ConstraintState(n_opening=n + len(text), matcher=matcher, n=matcher.n)


N_END = 64
"""Number of tokens at the end of a prompt in which to search for a thinking mark."""


class Constraints:
    """Builder of constraints for one model's answers; thread-safe."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._masks = MaskVocabulary(prompts.found) if prompts.found else None

    def checked(
        self, grammar: Grammar, as_text: Grammar, is_cancelled: IsCancelled = never
    ) -> Matcher:
        """Return the matcher for a grammar, which may take seconds.

        Args:
            as_text: the same grammar with texts instead of tokens, which can be checked without the
                vocabulary.

        Raises:
            GrammarError: the grammar cannot be used; the error gives the position.
            PromptError: the model has no vocabulary.
            Cancelled: `is_cancelled` has returned True.
        """
        vocabulary = self._vocabulary
        check_grammar(as_text, is_cancelled)
        return vocabulary.matcher(grammar)

    def of(
        self, matcher: Matcher | None, ids: Sequence[int], begun: Sequence[int] = (),
        said: str = "", *, thinks: bool | None = None, is_chat: bool = True,
        marks: ThinkingMarks | None = None,
    ) -> AnswerConstraint | None:  # fmt: skip
        """Return the constraint on an answer; None if there is no matcher.

        Args:
            ids: tokens of the prompt, including an earlier part of the answer.
            begun: tokens of that part, if known.
            said: text of that part.
            thinks, is_chat: see `thinking_state`.
            marks: its thinking marks; None for those in the template.

        Raises:
            GrammarError: the earlier part violates the constraint.
        """
        if matcher is None:
            return None
        vocabulary = self._vocabulary
        marks = marks or thinking_marks(self._prompts.template.source)
        n_said = len(begun) or len(said.encode())
        end = list(ids)[max(0, len(ids) - N_END - n_said) : max(0, len(ids) - len(begun))]
        before = b"".join(map(vocabulary.bytes_of, end)).decode("utf-8", "replace")
        if not begun:
            before = before.removesuffix(said)
        state = thinking_state(before, marks, thinks, is_chat=is_chat) if marks else "over"
        constraint = AnswerConstraint(vocabulary, matcher, marks, state)
        try:
            for token in begun:
                constraint.accept(token)
            if not begun:
                constraint.accept_text(said)
        except GrammarError as error:
            raise GrammarError(
                "The answer to continue does not have the requested output format.",
                "",
                "Regenerate it, or do not request a format.",
            ) from error
        return constraint

    @property
    def _vocabulary(self) -> MaskVocabulary:
        if self._masks is None:
            _ = self._prompts.tokenizer
            raise AssertionError("a tokenizer comes with masks")
        return self._masks


class AnswerGrammar(NamedTuple):
    """Grammar of an answer.

    Attributes:
        matcher: matcher of the grammar; None if any answer is allowed.
        marks: thinking marks before the grammar applies; None for those in the template.
    """

    matcher: Matcher | None
    marks: ThinkingMarks | None = None


def output_format(
    prompts: Prompts, constraints: Constraints, request: AnswerRequest, is_cancelled: IsCancelled
) -> AnswerGrammar:
    """Return the grammar for the answer to a conversation.

    If calling a function is optional and some function's schema cannot be expressed as a grammar,
    calls are unconstrained.

    Raises:
        GrammarError: the requested grammar cannot be used.
        PromptError: calls are required, but the functions' schemas cannot be used.
        Cancelled: `is_cancelled` has returned True.
    """
    tools, choice = callable_tools(request), request.tool_choice
    requested = request.grammar or request.sampling.form
    if not tools or (choice == "auto" and requested):
        return AnswerGrammar(
            constraints.checked(requested, requested, is_cancelled) if requested else None
        )
    form = prompts.template_use.form
    tokens = {text: token for token, text in prompts.control_marks.items()}
    grammar = grammar_of_calls(form, tools, tokens, choice)
    as_text = grammar_of_calls(form, tools, {}, choice)
    marks = form.thinking_marks if thinking_marks(prompts.template.source) else None
    try:
        return AnswerGrammar(constraints.checked(grammar, as_text, is_cancelled), marks)
    except Cancelled:
        raise
    except EngineError as error:
        if choice != "auto":
            _check_parameters(tools, is_cancelled)
            raise PromptError(
                "Calls to these functions cannot be enforced. {problem}",
                "Simplify their schemas.",
                problem=error.message,
            ) from error
        log.info("tool calls are not constrained by their schemas: %s", error)
        return AnswerGrammar(None)


def _check_parameters(tools: Sequence[Tool], is_cancelled: IsCancelled) -> None:
    for tool in tools:
        try:
            schema = Grammar("json_schema", tool.parameters or NO_PARAMETERS)
            check_grammar(schema, is_cancelled)
        except GrammarError as error:
            raise ToolError(
                "The parameters of the function {tool} cannot be used. {problem}",
                tool.name,
                "Correct them, or set tool_choice to auto.",
                problem=error.message,
            ) from error


def callable_tools(request: AnswerRequest) -> Sequence[Tool]:
    """Return the functions that an answer may call.

    Raises:
        PromptError: the request requires a function that does not exist.
    """
    choice = request.tool_choice
    if choice == "none":
        return ()
    if choice.startswith("=") and choice[1:] not in {tool.name for tool in request.tools}:
        raise PromptError(
            "There is no function {name} to call.", "Name one of the tools.", name=choice[1:]
        )
    if choice == "required" and not request.tools:
        raise PromptError("There is no function to call.", "Add tools to the request.")
    return request.tools
