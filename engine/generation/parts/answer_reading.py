"""Reading of an answer in parts: its form, and the place where it begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from engine.text.tool_calls.parser import AnswerParser
from engine.text.tool_calls.parts import AnswerPartEvent, PartText
from engine.text.tool_calls.schemas import parameters_of

if TYPE_CHECKING:
    from engine.generation.prompts import Prompts
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
    """Return the text of a part."""
    return "".join(e.text for e in events if isinstance(e, PartText) and e.part == part)
