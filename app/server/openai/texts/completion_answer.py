"""Completions made of the events of the engine, with their prompts before them if that is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.server.models import Spell
from app.server.openai.choices import ChoicesAnswer
from app.server.openai.logprobs import (
    TokenPlaces,
    completion_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from app.server.openai.texts.completion_request import CompletionRequest
from app.server.openai.texts.inputs import TextOrIds
from app.server.openai.usage import REASONS
from app.server.web.responses import Document
from engine import Event, Finished, TokenLogprob, TokensScored, TokenText

KIND = "text_completion"


@dataclass(slots=True)
class CompletionChoice:
    """One of the answers to a request, as far as it has come.

    Attributes:
        echo: the prompt, where it is repeated; "" once it has been sent.
        scores: probabilities of the prompt's tokens, where they are told; None once they were.
        places: places of its tokens, behind the prompt where that is repeated.
    """

    places: TokenPlaces

    echo: str = ""
    scores: Document | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class CompletionAnswer(ChoicesAnswer):
    """The response to a request, made of the events of its answers.

    The first events are those of the prompts' scores, where the request asks for these.

    Args:
        prompts: the prompts one by one.
        model: id of the model.
        spell: returns the bytes of a token, where the request asks for logprobs, or for a prompt
            that was sent as ids.
    """

    def __init__(
        self, request: CompletionRequest, prompts: Sequence[TextOrIds], model: str,
        spell: Spell | None,
    ) -> None:  # fmt: skip
        super().__init__(request, "cmpl", (KIND, KIND), model)
        self._spell, self._n = spell, request.n
        self._has_logprobs = request.logprobs is not None
        self._n_scored = len(prompts) if request.wants_scores else 0
        self._echoes = [_spelt(one, spell) if request.echo else "" for one in prompts]
        self._choices = [
            CompletionChoice(TokenPlaces(len(echo)), echo)
            for echo in self._echoes
            for _ in range(request.n)
        ]

    def _whole(self) -> list[Document]:
        return [
            self._choice(index, "".join(one.texts), one.logprobs)
            for index, one in enumerate(self._choices)
        ]

    def _told(self, index: int, event: Event) -> Iterable[Document]:
        self._note(index, event)
        at = index - self._n_scored
        if isinstance(event, TokenText):
            return [self._choice(at, event.text, event.logprobs)]
        if isinstance(event, Finished):
            return [self._choice(at, "", (event.end,) if event.end else ())]
        return ()

    def _note(self, index: int, event: Event) -> None:
        if isinstance(event, TokensScored):
            assert self._spell is not None, "needed for scores"
            scores = prompt_logprobs(event, self._echoes[index], self._spell)
            for choice in self._choices[index * self._n : (index + 1) * self._n]:
                choice.scores = scores
            return
        at = index - self._n_scored
        choice = self._choices[at]
        self._count.note(event, is_first=at % self._n == 0)
        if isinstance(event, TokenText):
            choice.texts.append(event.text)
            choice.logprobs += event.logprobs
        elif isinstance(event, Finished):
            choice.reason = REASONS[event.reason]
            choice.logprobs += (event.end,) if event.end else ()

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob]) -> Document:
        """Return more of an answer, with the prompt before its first text where it is repeated."""
        choice = self._choices[index]
        logprobs, choice.scores = choice.scores, None
        if self._has_logprobs and self._spell is not None and tokens:
            places = choice.places.of(self._spell.shown(one.id) for one in tokens)
            told = completion_logprobs(tokens, self._spell, places)
            logprobs = told if logprobs is None else joined_logprobs(logprobs, told)
        text, choice.echo = choice.echo + text, ""
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason,
        }  # fmt: skip


def _spelt(prompt: TextOrIds, spell: Spell | None) -> str:
    """Return the text of a prompt."""
    if isinstance(prompt, str):
        return prompt
    assert spell is not None, "needed for ids"
    return b"".join(map(spell, prompt)).decode("utf-8", "replace")
