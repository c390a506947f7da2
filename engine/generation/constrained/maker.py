"""Constraints of one model's answers, made from grammars, prompts and what was said already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.decoding.grammar.checker import check_grammar
from engine.decoding.grammar.matcher import MaskVocabulary
from engine.errors import GrammarError
from engine.generation.constrained.constraint import AnswerConstraint
from engine.sampling_params import Grammar
from engine.text.thinking import thinking_marks, thinking_state
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Matcher
    from engine.generation.prompts import Prompts
    from engine.text.thinking import ThinkingMarks

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
