"""Structured output: the grammar of one answer, and which tokens it allows next."""

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
"""Line breaks that may stand between a mark and what the grammar describes; models put them there.
"""


@dataclass(frozen=True, slots=True)
class ConstraintState:
    """State of one answer with a form: what has come of it, and what may come next.

    Attributes:
        waits: texts that come before the grammar begins, in this order; anything may stand before
            and between them.
        tail: end of what was said, in which the first of `waits` may have begun.
        n_opening: number of bytes of the opening mark of thinking with which the answer has begun;
            None where no thinking can begin any more.
        gap: line breaks that may still come before what the grammar describes.
        matcher: what the grammar says; None where the answer has begun with a part of the opening
            mark that it does not allow.
        n: number of tokens that the matcher has accepted.
        lead: tokens with which the answer has begun, and which may become the grammar's lead; None
            where it is known whether they do.
    """

    waits: tuple[bytes, ...] = ()
    tail: bytes = b""
    n_opening: int | None = None
    gap: bytes = b""
    matcher: Matcher | None = None
    n: int = 0
    lead: tuple[int, ...] | None = None


FREE = ConstraintState()
"""State of an answer that turned out to have no form: anything may come."""


class AnswerConstraint:
    """The form that one answer must have, and how much of it has been said.

    The grammar begins exactly behind the end of thinking, or behind its trigger if it has one. A
    triggered one may begin any number of times. One with a lead holds from the beginning, but only
    once the answer has begun with the lead.

    Args:
        grammar: matcher of the grammar, of which nothing has been said.
        marks: marks of the model's thinking; None if it does not think.
        thinking: whether the answer begins within thinking.

    Attributes:
        is_slow: whether the last mask took so long that one pass should not compute several.
    """

    def __init__(
        self, vocabulary: MaskVocabulary, grammar: Matcher, marks: ThinkingMarks | None = None,
        thinking: ThinkingState = "over",
    ) -> None:  # fmt: skip
        self._vocabulary, self._fresh = vocabulary, grammar
        self._opening = marks.opening.encode() if marks else b""
        closing = tuple(text.encode() for text in marks.closing) if marks else ()
        self._trigger = (grammar.trigger.encode(),) if grammar.trigger else ()
        self._behind_thought = closing + self._trigger
        self._lead = AnswerMark(grammar.lead) if grammar.lead else None
        state = ConstraintState(waits=self._behind_thought if thinking == "open" else self._trigger)
        if not state.waits and self._lead:
            state = ConstraintState(lead=())
        elif not state.waits:
            n_opening = 0 if thinking == "possible" else None
            state = ConstraintState(n_opening=n_opening, matcher=self._fresh.copy())
        self._state = state
        self._before: list[ConstraintState] = []
        self.is_slow = False
        self._spent = self._seconds = 0.0  # of processor time, see `_metered`

    @property
    def is_over(self) -> bool:
        """Whether the answer has its form, and nothing more may come."""
        matcher = self._state.matcher
        is_lazy = self._trigger or self._lead
        return not is_lazy and matcher is not None and matcher.is_over

    def restrict(self, logits: Logits, ends: Collection[int]) -> None:
        """Set the logits of all tokens that are not allowed next to -inf.

        Args:
            ends: tokens that end the answer.

        Raises:
            GrammarError: the grammar has become too complex, or takes too long.
        """
        mask = self.allowed(ends)
        logits[mask.size :] = -np.inf
        logits[: mask.size][~mask] = -np.inf

    def allowed(self, ends: Collection[int]) -> Mask:
        """Return which tokens are allowed next; see `restrict`."""
        with self._metered():
            mask = self._mask()
        self.is_slow = self._spent > DRAFTED_MASK_SECONDS
        mask[[token for token in self._vocabulary.eog_ids if token not in ends]] = False
        return mask

    def accept(self, token: int) -> None:
        """Take the next token of the answer.

        Raises:
            GrammarError: it is not allowed, or the grammar takes too long.
        """
        with self._metered():
            self._before.append(self._state)
            self._state = self._after(self._vocabulary.bytes_of(token), token)

    def accept_text(self, text: str) -> None:
        """Take the beginning of an answer whose tokens are not known; see `accept`."""
        for token in self._vocabulary.encode(text.encode()):
            self.accept(token)

    def take_back(self, n: int) -> None:
        """Forget the last n tokens."""
        self._state = self._before[-n]
        del self._before[-n:]
        if self._state.matcher is not None:
            self._state.matcher.rewind(self._state.n)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count the unusual processor time of the `with` block, for which other answers wait.

        Raises:
            GrammarError: too much was used before.
        """
        if self._seconds > MAX_MASK_SECONDS:
            raise GrammarError(
                "The answer cannot go on in its form: to find out which tokens it allows takes too"
                " long.",
                hint="Use a grammar that reads each text in one way only.",
            )
        begun = time.thread_time()
        try:
            yield
        finally:
            self._spent = time.thread_time() - begun
            self._seconds += max(0.0, self._spent - USUAL_MASK_SECONDS)

    # which tokens are allowed

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
        """Return the tokens that may come before the grammar begins.

        An answer does not end there, unless the grammar begins only behind a trigger.
        """
        mask = np.ones(self._vocabulary.n, np.bool_)
        if state.waits != self._trigger:
            mask[self._vocabulary.eog_ids] = False
        if len(state.waits) == 1:
            mask[self._too_long(state.tail, state.waits[0])] = False
        return mask

    def _too_long(self, tail: bytes, mark: bytes) -> list[int]:
        """Return the tokens that complete a mark and go on with more than line breaks."""
        found = self._vocabulary.beyond(mark)
        for n in range(len(mark)):
            if tail.endswith(mark[:n]):
                rest = mark[n:]
                longer = self._vocabulary.longer_than(rest)
                found = found + [i for text, i in longer if text[len(rest) :] not in (b"\n", GAP)]
        return found

    def _opening_pieces(self, n: int) -> list[int]:
        """Return the tokens that go on with the opening mark of thinking behind its first bytes."""
        rest, found = self._opening[n:], self._vocabulary.with_bytes
        ends = [token for size in range(len(GAP) + 1) for token in found(rest + GAP[:size])]
        if found(rest):
            return ends
        return ends + [token for size in range(1, len(rest)) for token in found(rest[:size])]

    def _line_breaks(self, gap: bytes) -> list[int]:
        sizes = range(1, len(gap) + 1)
        return [token for size in sizes for token in self._vocabulary.with_bytes(gap[:size])]

    # what they lead to

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
        """Return the state behind more text, in which texts that are waited for may come."""
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
        for token in self._vocabulary.encode(text):  # of an answer that nobody has restricted
            begun = self._matched(begun, token)
        return begun

    def _led(self, tokens: tuple[int, ...]) -> ConstraintState:
        """Return the state behind the first tokens of an answer, which may make the lead.

        An answer with the lead that the grammar does not allow, such as a call of a function that
        there is not, is free.
        """
        assert self._lead is not None, "only a grammar with a lead waits for it"
        told = b"".join(map(self._vocabulary.bytes_of, tokens)).lstrip()
        text, opening = told.decode("utf-8", "replace"), self._opening.decode()
        if opening and text.startswith(opening):
            rest = told.removeprefix(self._opening)
            return self._searched(ConstraintState(waits=self._behind_thought), rest)
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
        """Return the state behind a token of what the grammar describes."""
        matcher = state.matcher
        assert matcher is not None, "other tokens are not allowed"
        matcher.accept(token)
        if self._trigger and matcher.is_over:
            return ConstraintState(waits=self._trigger)
        if self._lead and matcher.is_over:
            return FREE
        return ConstraintState(matcher=matcher, n=matcher.n)

    def _opened(self, state: ConstraintState, n: int, text: bytes, token: int) -> ConstraintState:
        """Return the state behind a token that may be of the opening mark, or of the grammar."""
        rest = self._opening[n:]
        if text.startswith(rest):
            return self._searched(ConstraintState(waits=self._behind_thought), text[len(rest) :])
        if not text or not rest.startswith(text):
            return self._matched(state, token)
        matcher = state.matcher
        if matcher is None or not matcher.can_accept(token):
            return ConstraintState(n_opening=n + len(text))
        matcher.accept(token)
        return ConstraintState(n_opening=n + len(text), matcher=matcher, n=matcher.n)


N_END = 64
"""Number of tokens at the end of a prompt in which a mark of thinking is looked for."""


class Constraints:
    """Maker of the constraints of one model's answers; threads may share it."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._masks = MaskVocabulary(prompts.found) if prompts.found else None

    def checked(
        self, grammar: Grammar, as_text: Grammar, is_cancelled: IsCancelled = never
    ) -> Matcher:
        """Return the matcher of a grammar, which may take seconds.

        Args:
            as_text: the same grammar, but with texts in place of tokens, so that it can be checked
                without the vocabulary.

        Raises:
            GrammarError: it cannot be used; the error names the place.
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
        """Return the constraint of an answer; None if any is accepted.

        Args:
            matcher: see `matcher`.
            ids: tokens of the prompt, with those that the answer has had.
            begun: tokens that the answer has had, if they are known.
            said: text that it has had.
            thinks, is_chat: see `thinking_state`.
            marks: marks of its thinking; None for those of its template.

        Raises:
            GrammarError: what the answer has had does not have the form.
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
                "The answer that is to be continued does not have the form that is asked for.",
                "",
                "Have it answered anew, or leave the form of the answer open.",
            ) from error
        return constraint

    @property
    def _vocabulary(self) -> MaskVocabulary:
        if self._masks is None:
            _ = self._prompts.tokenizer
            raise AssertionError("with a tokenizer there are masks")
        return self._masks


class AnswerGrammar(NamedTuple):
    """The form that an answer must have.

    Attributes:
        matcher: matcher of the grammar; None where any answer will do.
        marks: marks of the thinking behind which it begins; None for those of the template.
    """

    matcher: Matcher | None
    marks: ThinkingMarks | None = None


def output_format(
    prompts: Prompts, constraints: Constraints, request: AnswerRequest, is_cancelled: IsCancelled
) -> AnswerGrammar:
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
        return AnswerGrammar(constraints.checked(own, own, is_cancelled) if own else None)
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
                f"No call can be required of these functions. {error}", "Simplify their schemas."
            ) from error
        log.info("calls are not held to the schemas of their functions: %s", error)
        return AnswerGrammar(None)


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


def callable_tools(request: AnswerRequest) -> Sequence[Tool]:
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
