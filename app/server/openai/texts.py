"""Completions made of the events of the engine, with their prompts before them if that is asked."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from sys import byteorder
from typing import Literal

from starlette.responses import Response

from app.server.context import ServerContext
from app.server.models import Spell
from app.server.openai.answer import (
    REASONS,
    ChoicesAnswer,
    TokenPlaces,
    completion_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from app.server.openai.conversation import (
    MAX_TOOLS,
    AnyCompletion,
    ChatTurn,
    OfferedTool,
    chat_messages,
    form_of,
    form_place,
    offered_tools,
)
from app.server.openai.sampling import MAX_CHOICES, sampling_of
from app.server.refusal import (
    FieldPlaces,
    bad_value,
    check_conversation,
    check_size,
    error_document,
)
from app.server.request_fields import body_field
from app.server.request_log import RequestRecord
from app.server.web.responses import AwaitedJson, Document, EventStream, json_response
from engine import (
    AnswerBlocks,
    AnswerRequest,
    ApplyTemplate,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Event,
    Finished,
    JsonObject,
    ModelLoaded,
    ScoreTokens,
    TemplateApplied,
    Tokenize,
    Tokenized,
    TokenLogprob,
    TokensScored,
    TokenText,
)

TextInput = str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
"""A text, several, the ids of a text's tokens, or those of several texts."""

TextOrIds = str | tuple[int, ...]
"""A text, or the ids of its tokens."""

MAX_IDS = 1 << 20
"""Largest number of tokens of a text."""


def separate_inputs(given: TextInput, field: str, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return the texts of a request one by one, each as it is or as its tokens.

    Args:
        field: name of the field that they stand in.
        n_vocab: number of tokens of the model.

    Raises:
        Refusal: one has no tokens, too many, or one that the model lacks.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        ids = tuple(one for one in given if isinstance(one, int))
        check_ids(ids, field, n_vocab)
        return (ids,)
    found: list[TextOrIds] = []
    for at, one in enumerate(given):
        assert isinstance(one, str | tuple), "the request was checked"
        if isinstance(one, tuple):
            check_ids(one, f"{field}[{at}]", n_vocab)
        found.append(one)
    return tuple(found)


def check_ids(ids: tuple[int, ...], place: str, n_vocab: int) -> None:
    """Check that there are tokens, and that the model has them all.

    Raises:
        Refusal: it is not so.
    """
    if not 0 < len(ids) <= MAX_IDS:
        text = f"{place} must have 1 to {MAX_IDS} tokens, not {len(ids)}."
        raise bad_value(place, text)
    if min(ids) >= 0 and max(ids) < n_vocab:
        return
    for at, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            wrong = f"{place}[{at}]"
            raise bad_value(wrong, f"{wrong} must be from 0 to {n_vocab - 1}, not {token}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(AnyCompletion):
    """A request for completions."""

    prompt: TextInput = body_field(
        "The text to go on with, or several, or the ids of their tokens.", least=1, most=MAX_IDS
    )
    suffix: str = body_field("The text behind the gap that the answer fills in.", "")
    echo: bool = body_field(
        "Repeat the prompt before the answer, and tell its logprobs, too.", default=False
    )
    logprobs: int | None = body_field(
        "Number of likeliest tokens to tell at each place.", None, least=0, most=20
    )
    best_of: int | None = body_field("Must be n, if anything.", None)

    @property
    def wants_scores(self) -> bool:
        """Whether the request asks for the log-probabilities of the prompt's tokens."""
        return self.echo and self.logprobs is not None


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
    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)
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
            self._choice(index, one.blocks.text_of("text"), one.blocks.logprobs)
            for index, one in enumerate(self._choices)
        ]

    def _events(self, index: int, event: Event) -> Iterable[Document]:
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
        choice.blocks.add(event)
        if isinstance(event, Finished):
            choice.reason = REASONS[event.reason]
            choice.blocks.logprobs += (event.end,) if event.end else ()

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


DEFAULT_TOKENS = 16
"""Most tokens of a completion where the request does not say, as in OpenAI's protocol."""


async def completions(
    context: ServerContext, record: RequestRecord, request: CompletionRequest
) -> Response:
    """Go on with one or several texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = context.find(request.model, record)
    prompts = separate_inputs(request.prompt, "prompt", model.info.n_vocab)
    n_answers = len(prompts) * request.n
    refuse_impossible(request, n_answers)
    grammar = form_of(request)

    def make(loaded: ModelLoaded) -> list[AnswerRequest | ScoreTokens]:
        most = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        params = sampling_of(request, context.settings.sampling, loaded.info, most)
        scored = prompts if request.wants_scores else ()
        answers = [
            AnswerRequest(
                prompt=prompt, suffix=request.suffix, sampling=one, timed_every=0,
                grammar=grammar, n_logprobs=request.logprobs,
            )
            for prompt in prompts
            for one in params
        ]  # fmt: skip
        return [*(ScoreTokens(prompt, request.logprobs or 0) for prompt in scored), *answers]

    needs_spelling = request.logprobs is not None or request.echo
    spell = await context.spelling.of(model.info.path) if needs_spelling else None
    events = context.answers(record, n_answers, make, places=FieldPlaces(form_place(request)))
    answer = CompletionAnswer(request, prompts, model.id, spell)
    if request.stream:
        return EventStream(answer.stream(events), error_document, context.settings.ping_s)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_impossible(request: CompletionRequest, n_answers: int) -> None:
    """Refuse what would be answered otherwise than it is meant.

    Raises:
        Refusal: there is something of that kind.
    """
    if n_answers > MAX_CHOICES:
        raise bad_value("n", f"n times the prompts are {n_answers}, at most {MAX_CHOICES} can be.")
    if request.best_of not in (None, request.n):
        raise bad_value("best_of", "best_of must be n; answers are not compared.")
    if request.suffix and request.echo:
        raise bad_value("echo", "echo cannot go with suffix: the answer is not behind the prompt.")


MAX_INPUTS = 2048
"""Largest number of texts of a request, as in OpenAI's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A request for embeddings."""

    input: TextInput = body_field(
        "A text, or several, or the ids of their tokens.", least=1, most=MAX_IDS
    )
    model: str = body_field("Name of the model; any that is loaded if it is empty.", "")
    encoding_format: Literal["float", "base64"] = body_field(
        "Numbers, or the bytes of little-endian F32 in base64.", "float"
    )
    dimensions: int | None = body_field("Must be the model's, if anything.", None)
    user: str = body_field("Without effect.", "")


async def embeddings(
    context: ServerContext, record: RequestRecord, request: EmbeddingRequest
) -> Response:
    """Return the embeddings of texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    info = context.find(request.model, record).info
    if request.dimensions not in (None, info.n_embd):
        raise bad_value("dimensions", f"dimensions must be {info.n_embd}, the model's own.")
    command = Embed(embedding_inputs(request.input, info.n_vocab))

    async def make() -> Document:
        done = await embedded(context, record, command)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, request)}
            for index, vector in enumerate(done.vectors)
        ]
        usage = {"prompt_tokens": done.n_tokens, "total_tokens": done.n_tokens}
        return {"object": "list", "data": data, "model": record.model, "usage": usage}

    return AwaitedJson(make, error_document)


async def embedded(context: ServerContext, record: RequestRecord, command: Embed) -> Embedded:
    """Return the embeddings of texts, once the engine has room for them.

    Raises:
        Refusal: they cannot be computed.
    """
    async with context.admission.places(1):
        done = await context.run(record, command)
    assert isinstance(done, Embedded), "the closing event of this command"
    record.n_prompt = done.n_tokens
    return done


def embedding_inputs(given: TextInput, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return the texts of a request one by one, each as it is or as its tokens.

    Raises:
        Refusal: there is an empty one or a token that the model lacks, or there are too many.
    """
    found = separate_inputs(given, "input", n_vocab)
    if len(found) > MAX_INPUTS:
        text = f"input has {len(found)} texts, at most {MAX_INPUTS} can be."
        raise bad_value("input", text)
    if "" in found:
        place = f"input[{found.index('')}]"
        raise bad_value(place, f"{place} is empty.")
    return found


def _written(vector: Sequence[float], request: EmbeddingRequest) -> list[float] | str:
    """Return a vector as the request wants it."""
    if request.encoding_format == "float":
        return [*vector]
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


MAX_TOKENISED = 1 << 20
"""Maximum number of characters of a text to tokenise."""

MAX_SPELT = 1 << 17
"""The same if the text of each token is returned, too."""

MAX_DECODED = 1 << 18
"""Maximum number of tokens to detokenise at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text whose tokens are wanted."""

    content: str = body_field("The text.")
    model: str = body_field("Name of the model.", "")
    add_special: bool = body_field("Add what begins and ends a text.", default=False)
    parse_special: bool = body_field("Read the names of control tokens as such.", default=True)
    with_pieces: bool = body_field("Tell the text of each token, too.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Tokens whose text is wanted."""

    tokens: tuple[int, ...] = body_field("Ids of the tokens.", most=MAX_DECODED)
    model: str = body_field("Name of the model.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRequest:
    """A conversation whose prompt is wanted."""

    messages: tuple[ChatTurn, ...] = body_field("The conversation.", least=1)
    model: str = body_field("Name of the model.", "")
    tools: tuple[OfferedTool, ...] = body_field("What the model may call.", (), most=MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = body_field("Variables for the chat template.", None)
    add_generation_prompt: bool = body_field("End where the assistant begins.", default=True)


async def tokenize(
    context: ServerContext, record: RequestRecord, request: TokenizeRequest
) -> Response:
    """Return the tokens of a text.

    Raises:
        Refusal: it is too long.
    """
    check_size(request.content, "content", MAX_SPELT if request.with_pieces else MAX_TOKENISED)
    command = Tokenize(
        request.content, request.add_special, request.parse_special, request.with_pieces
    )
    context.find(request.model, record)
    done = await context.run(record, command)
    assert isinstance(done, Tokenized), "the closing event of this command"
    tokens: list[int] | list[Document] = [*done.ids]
    if request.with_pieces:
        pairs = zip(done.ids, done.pieces, strict=True)
        tokens = [{"id": token, "piece": _piece(bytes(piece))} for token, piece in pairs]
    return json_response({"tokens": tokens, "count": len(done.ids)})


def _piece(spelt: bytes) -> str | list[int]:
    """Return a token's text, or its bytes where they are no whole characters."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return [*spelt]


async def detokenize(
    context: ServerContext, record: RequestRecord, request: DetokenizeRequest
) -> Response:
    """Return the text of tokens.

    Raises:
        Refusal: the model has no such tokens.
    """
    n_vocab = context.find(request.model, record).info.n_vocab
    if request.tokens:
        check_ids(request.tokens, "tokens", n_vocab)
    done = await context.run(record, Detokenize(request.tokens))
    assert isinstance(done, Detokenized), "the closing event of this command"
    return json_response({"content": done.text})


async def apply_template(
    context: ServerContext, record: RequestRecord, request: TemplateRequest
) -> Response:
    """Return the prompt of a conversation.

    Raises:
        Refusal: it is too long, or cannot be written.
    """
    variables = request.chat_template_kwargs
    command = ApplyTemplate(
        chat_messages(request.messages),
        offered_tools(request.tools),
        json.dumps(variables) if variables else "",
        add_generation_prompt=request.add_generation_prompt,
    )
    check_conversation(command)
    context.find(request.model, record)

    async def make() -> Document:
        done = await context.run(record, command)
        assert isinstance(done, TemplateApplied), "the closing event of this command"
        return {"prompt": done.prompt}

    return AwaitedJson(make, error_document)
