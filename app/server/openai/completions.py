"""The route of completions: texts that are gone on with, without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.responses import Response

from app.server.desk import AnswerEvents, Desk
from app.server.ledger import RequestRecord
from app.server.models import Spell
from app.server.openai.chat_answer import DONE
from app.server.openai.chat_request import AnyCompletion
from app.server.openai.errors import error_document
from app.server.openai.forms import form_of
from app.server.openai.logprobs import completion_logprobs
from app.server.openai.sampling import MOST_CHOICES, sampling_of
from app.server.openai.usage import REASONS, TokenCount
from app.server.refusal import bad_value
from app.server.requests.reading import asked
from app.server.web.responses import AwaitedJson, Document, EventStream, event_bytes
from engine import Event, Finished, Generate, ModelLoaded, TokenLogprob, TokenText

DEFAULT_TOKENS = 16
"""Most tokens of a completion where the request does not say, as in OpenAI's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(AnyCompletion):
    """A request for completions."""

    prompt: str | tuple[str, ...] = asked(
        "The text to go on with, or several.", least=1, most=MOST_CHOICES
    )
    suffix: str = asked("The text behind the gap that the answer fills in.", "")
    echo: bool = asked("Repeat the prompt before the answer.", default=False)
    logprobs: int | None = asked(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    best_of: int | None = asked("Must be n, if anything.", None)


async def completions(desk: Desk, record: RequestRecord, request: CompletionRequest) -> Response:
    """Go on with one or several texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = desk.find(request.model, record)
    prompts = (request.prompt,) if isinstance(request.prompt, str) else request.prompt
    n_answers = len(prompts) * request.n
    if n_answers > MOST_CHOICES:
        raise bad_value("n", f"n times the prompts are {n_answers}, at most {MOST_CHOICES} can be.")
    if request.best_of not in (None, request.n):
        raise bad_value("best_of", "best_of must be n; answers are not compared.")
    grammar = form_of(request)

    def make(loaded: ModelLoaded) -> list[Generate]:
        most = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        params = sampling_of(request, desk.settings.sampling, loaded.info.n_vocab, most)
        return [
            Generate(
                prompt=prompt, suffix=request.suffix, sampling=one, timed_every=0,
                grammar=grammar, n_logprobs=request.logprobs,
            )
            for prompt in prompts
            for one in params
        ]  # fmt: skip

    has_logprobs = request.logprobs is not None
    spell = await desk.spelling.of(model.info.path) if has_logprobs else None
    events = desk.answers(record, n_answers, make)
    answer = CompletionAnswer(request, prompts, model.id, spell)
    if request.stream:
        return EventStream(answer.stream(events), error_document, desk.settings.ping_s)
    return AwaitedJson(lambda: answer.collect(events), error_document)


@dataclass(slots=True)
class CompletionChoice:
    """One of the answers to a request, as far as it has come.

    Attributes:
        echo: the prompt, where it is repeated; "" once it has been sent.
        n_sent: number of characters that were told.
    """

    echo: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    n_sent: int = 0


class CompletionAnswer:
    """The response to a request, made of the events of its answers.

    Args:
        model: id of the model.
        spell: returns the bytes of a token, where the request asks for logprobs.
    """

    def __init__(
        self, request: CompletionRequest, prompts: tuple[str, ...], model: str, spell: Spell | None
    ) -> None:
        self._spell, self._n = spell, request.n
        self._has_usage = request.wants_usage
        self._choices = [
            CompletionChoice(prompt if request.echo else "")
            for prompt in prompts
            for _ in range(request.n)
        ]
        self._count = TokenCount()
        self._head: Document = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
            "created": int(time.time()), "model": model,
        }  # fmt: skip

    async def collect(self, events: AnswerEvents) -> Document:
        """Return the whole response."""
        async with aclosing(events):
            async for index, event in events:
                self._note(index, event)
        choices = [
            self._choice(index, "".join(one.texts), one.logprobs)
            for index, one in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self._count.document()}

    async def stream(self, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
        """Yield the response as events."""
        async with aclosing(events):
            async for index, event in events:
                self._note(index, event)
                if isinstance(event, TokenText | Finished):
                    text = event.text if isinstance(event, TokenText) else ""
                    logprobs = list(event.logprobs) if isinstance(event, TokenText) else []
                    choice = self._choice(index, text, logprobs)
                    chunk = {**self._head, "choices": [choice]}
                    yield event_bytes(chunk | {"usage": None} if self._has_usage else chunk)
        if self._has_usage:
            yield event_bytes({**self._head, "choices": [], "usage": self._count.document()})
        yield DONE

    def _note(self, index: int, event: Event) -> None:
        choice = self._choices[index]
        self._count.note(event, is_first=index % self._n == 0)
        if isinstance(event, TokenText):
            choice.texts.append(event.text)
            choice.logprobs += event.logprobs
        elif isinstance(event, Finished):
            choice.reason = REASONS[event.reason]

    def _choice(self, index: int, text: str, tokens: list[TokenLogprob]) -> Document:
        """Return more of an answer, with the prompt before its first text where it is repeated."""
        choice = self._choices[index]
        logprobs = None
        if self._spell is not None and tokens:
            offset = choice.n_sent + len(choice.echo)
            logprobs = completion_logprobs(tokens, self._spell, offset)
        text, choice.echo = choice.echo + text, ""
        choice.n_sent += len(text)
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason,
        }  # fmt: skip
