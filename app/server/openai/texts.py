"""Endpoints for completions, embeddings, tokenization and chat templates."""

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
    IGNORED,
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
"""One or more texts, as strings or token ids."""

TextOrIds = str | tuple[int, ...]

MAX_IDS = 1 << 20


def separate_inputs(given: TextInput, field: str, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return each text in a request separately.

    Args:
        field: name of the field that contains them.
        n_vocab: vocabulary size.

    Raises:
        Refusal: a list of token ids is empty or too long, or an id is invalid.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        ids = tuple(one for one in given if isinstance(one, int))
        check_ids(ids, field, n_vocab)
        return (ids,)
    inputs: list[TextOrIds] = []
    for at, one in enumerate(given):
        assert isinstance(one, str | tuple), "the request was validated"
        if isinstance(one, tuple):
            check_ids(one, f"{field}[{at}]", n_vocab)
        inputs.append(one)
    return tuple(inputs)


def check_ids(ids: tuple[int, ...], place: str, n_vocab: int) -> None:
    """Check the number of token ids and their range.

    Raises:
        Refusal: there are none or too many, or one is invalid.
    """
    if not 0 < len(ids) <= MAX_IDS:
        text = "{place} must have 1 to {most} tokens, not {n}."
        raise bad_value(place, text, place=place, most=MAX_IDS, n=len(ids))
    if min(ids) >= 0 and max(ids) < n_vocab:
        return
    for at, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            wrong, text = f"{place}[{at}]", "{place} must be from 0 to {last}, not {token}."
            raise bad_value(wrong, text, place=wrong, last=n_vocab - 1, token=token)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(AnyCompletion):
    """A request for completions."""

    prompt: TextInput = body_field(
        "One or more prompts, as texts or token ids.", least=1, most=MAX_IDS
    )
    suffix: str = body_field("Text after the gap that the answer fills.", "")
    echo: bool = body_field("Include the prompt, and its logprobs if requested.", default=False)
    logprobs: int | None = body_field("Number of top logprobs per token.", None, least=0, most=20)
    best_of: int | None = body_field("If set, must equal n.", None)

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt's logprobs are requested."""
        return self.echo and self.logprobs is not None


KIND = "text_completion"


@dataclass(slots=True)
class CompletionChoice:
    """One of the answers to a request.

    Attributes:
        places: offsets of its tokens, counted from the start of the prompt if that is included.
        echo: the prompt, if it is included; "" once it has been sent.
        scores: the prompt's logprobs, if requested; None once they have been sent.
    """

    places: TokenPlaces
    echo: str = ""
    scores: Document | None = None
    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)
    reason: str | None = None


class CompletionAnswer(ChoicesAnswer):
    """The response to a completion request; its first events are the prompts' scores, if any.

    Args:
        prompts: the separate prompts.
        spell: returns a token's bytes; None if the response has neither logprobs nor prompts.
    """

    def __init__(
        self, request: CompletionRequest, prompts: Sequence[TextOrIds], model: str,
        spell: Spell | None,
    ) -> None:  # fmt: skip
        super().__init__(request, "cmpl", (KIND, KIND), model)
        self._spell, self._n = spell, request.n
        self._has_logprobs = request.logprobs is not None
        self._n_scored = len(prompts) if request.wants_scores else 0
        self._echoes = [_text_of(one, spell) if request.echo else "" for one in prompts]
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
        choice = self._choices[index]
        logprobs, choice.scores = choice.scores, None
        if self._has_logprobs and self._spell is not None and tokens:
            places = choice.places.of(self._spell.shown(one.id) for one in tokens)
            more = completion_logprobs(tokens, self._spell, places)
            logprobs = more if logprobs is None else joined_logprobs(logprobs, more)
        text, choice.echo = choice.echo + text, ""
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason,
        }  # fmt: skip


def _text_of(prompt: TextOrIds, spell: Spell | None) -> str:
    if isinstance(prompt, str):
        return prompt
    assert spell is not None, "needed for ids"
    return b"".join(map(spell, prompt)).decode("utf-8", "replace")


DEFAULT_TOKENS = 16  # default for max_tokens in completions, as in OpenAI's protocol


async def completions(
    context: ServerContext, record: RequestRecord, request: CompletionRequest
) -> Response:
    """Complete one or more texts."""
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
    """Raise a `Refusal` if request fields are unsupported or contradict each other."""
    if n_answers > MAX_CHOICES:
        text = "n times the number of prompts is {n}; the limit is {most}."
        raise bad_value("n", text, n=n_answers, most=MAX_CHOICES)
    if request.best_of not in (None, request.n):
        raise bad_value("best_of", "best_of must equal n; answers are not ranked.")
    if request.suffix and request.echo:
        raise bad_value("echo", "echo cannot be combined with suffix.")


MAX_INPUTS = 2048  # maximum number of texts per request, as in OpenAI's protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A request for embeddings."""

    input: TextInput = body_field(
        "One or more texts, as strings or token ids.", least=1, most=MAX_IDS
    )
    model: str = body_field("Name of the model; empty for the loaded one.", "")
    encoding_format: Literal["float", "base64"] = body_field(
        "Numbers, or little-endian F32 encoded as base64.", "float"
    )
    dimensions: int | None = body_field(
        "If set, must equal the length of the model's vectors.", None
    )
    user: str = body_field(IGNORED, "")


async def embeddings(
    context: ServerContext, record: RequestRecord, request: EmbeddingRequest
) -> Response:
    """Return embeddings for texts."""
    info = context.find(request.model, record).info
    if request.dimensions not in (None, info.n_embd):
        text = "dimensions must be {n} to match the model."
        raise bad_value("dimensions", text, n=info.n_embd)
    command = Embed(embedding_inputs(request.input, info.n_vocab))

    async def make() -> Document:
        done = await embedded(context, record, command)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, request)}
            for index, vector in enumerate(done.vectors)
        ]
        usage = {"prompt_tokens": done.n_tokens, "total_tokens": done.n_tokens}
        return {"object": "list", "data": data, "model": record.model, "usage": usage}

    return AwaitedJson(make, error_document)


async def embedded(context: ServerContext, record: RequestRecord, command: Embed) -> Embedded:
    """Compute embeddings once the engine has room.

    Raises:
        Refusal: the queue is full, or the embeddings cannot be computed.
    """
    async with context.admission.places(1):
        done = await context.run(record, command)
    assert isinstance(done, Embedded), "the closing event of this command"
    record.n_prompt = done.n_tokens
    return done


def embedding_inputs(given: TextInput, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return each text in an embedding request separately.

    Raises:
        Refusal: a text is empty or has invalid token ids, or there are too many texts.
    """
    inputs = separate_inputs(given, "input", n_vocab)
    if len(inputs) > MAX_INPUTS:
        text = "input has {n} texts; the limit is {most}."
        raise bad_value("input", text, n=len(inputs), most=MAX_INPUTS)
    if "" in inputs:
        place = f"input[{inputs.index('')}]"
        raise bad_value(place, "{place} is empty.", place=place)
    return inputs


def _encoded(vector: Sequence[float], request: EmbeddingRequest) -> list[float] | str:
    if request.encoding_format == "float":
        return [*vector]
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


MAX_TOKENISED = 1 << 20  # maximum length of a text to tokenize, in characters
MAX_SPELT = 1 << 17  # the same limit if pieces are also returned
MAX_DECODED = 1 << 18  # maximum number of tokens to detokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A request to tokenize a text."""

    content: str = body_field("The text.")
    model: str = body_field("Name of the model.", "")
    add_special: bool = body_field("Add BOS and EOS.", default=False)
    parse_special: bool = body_field("Parse the text of special tokens.", default=True)
    with_pieces: bool = body_field("Include the text of each token.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """A request to detokenize tokens."""

    tokens: tuple[int, ...] = body_field("Token ids.", most=MAX_DECODED)
    model: str = body_field("Name of the model.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRequest:
    """A request to apply the chat template."""

    messages: tuple[ChatTurn, ...] = body_field("The conversation.", least=1)
    model: str = body_field("Name of the model.", "")
    tools: tuple[OfferedTool, ...] = body_field("Tools for the model.", (), most=MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = body_field("Variables for the chat template.", None)
    add_generation_prompt: bool = body_field(
        "End the prompt with the start of an answer.", default=True
    )


async def tokenize(
    context: ServerContext, record: RequestRecord, request: TokenizeRequest
) -> Response:
    """Return a text's tokens."""
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


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


async def detokenize(
    context: ServerContext, record: RequestRecord, request: DetokenizeRequest
) -> Response:
    """Return the text for tokens."""
    n_vocab = context.find(request.model, record).info.n_vocab
    if request.tokens:
        check_ids(request.tokens, "tokens", n_vocab)
    done = await context.run(record, Detokenize(request.tokens))
    assert isinstance(done, Detokenized), "the closing event of this command"
    return json_response({"content": done.text})


async def apply_template(
    context: ServerContext, record: RequestRecord, request: TemplateRequest
) -> Response:
    """Return the prompt for a conversation."""
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
