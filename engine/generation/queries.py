"""Queries to a loaded model: tokens, prompts, embeddings, log probabilities, cache use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, EngineError, PromptError, Sentence
from engine.generation.generate import check_n_logprobs, token_logprob
from engine.generation.prompts import PromptOptions
from engine.generation.requests import (
    ApplyTemplate,
    CacheCounted,
    CountCache,
    CountTokens,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Question,
    Reply,
    ScoreTokens,
    TemplateApplied,
    Tokenize,
    Tokenized,
    TokensCounted,
    TokensScored,
    has_images,
)
from engine.generation.results import TokenLogprob
from engine.generation.solo_sequence import SoloSequence, solo_sequence
from engine.model.forward.batch import PROMPT_BATCH
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits
    from engine.generation.image_prompts import PromptImages
    from engine.generation.prompts import Prompts
    from engine.generation.scheduler import Scheduler
    from engine.generation.stream import Occupancy
    from engine.model.architectures.description import ModelInfo
    from engine.model.layers.keys import Keys
    from engine.runtime.thread_runtime import ThreadRuntime
    from engine.text.chat_template import ChatTemplate
    from engine.text.messages import ChatMessage, Tool
    from engine.text.tokenizer import Tokenizer
    from engine.vision.images.placed import VisionInfo


Pooling = Literal["mean", "first", "last"]

MEAN, CLS, RANK = 1, 2, 4
BY_NUMBER: dict[int, Pooling] = {-1: "last", 0: "last", MEAN: "mean", CLS: "first", 3: "last"}
"""Pooling by `pooling_type`; -1 and 0 are unspecified, as in most files, and use the last token."""


def pooling_of(keys: Keys, name: str) -> Pooling:
    """Return how a model's hidden states are pooled.

    Args:
        keys: metadata of the model's file.
        name: name of the model, for error messages.

    Raises:
        EngineError: the model does not compute embeddings, or not with causal attention.
    """
    number = keys.integer("pooling_type", -1)
    if number == RANK:
        raise EngineError(
            "{model} scores how well texts match; it does not produce embeddings.",
            "Load an embedding model.",
            model=name,
        )
    if number not in BY_NUMBER:
        raise EngineError(
            "{model} pools embeddings in a way that is not supported ({number}).",
            "Load another embedding model.",
            model=name,
            number=number,
        )
    if not keys.flag("attention.causal", True):
        raise EngineError(
            "{model} reads text in both directions, which Tandem does not support.",
            "Load an embedding model that reads from left to right, such as Qwen3-Embedding.",
            model=name,
        )
    return BY_NUMBER[number]


def pooled(states: Iterable[NDArray[np.float32]], pooling: Pooling, n: int) -> NDArray[np.float32]:
    """Return a text's embedding (n_embd,), a vector of length 1.

    Args:
        states: hidden states of the text's tokens, in parts of (rows, n_embd); for "last" or
            "first" pooling, only those of that token are needed.
        n: number of tokens in the text.

    Raises:
        EngineError: the states are not finite.
    """
    parts = [part.astype(np.float64) for part in states]
    if pooling == "mean":
        vector = np.sum([part.sum(0) for part in parts], 0) / n
    else:
        vector = parts[0][0] if pooling == "first" else parts[-1][-1]
    size = float(np.linalg.norm(vector))
    if not np.isfinite(size):
        raise EngineError(
            "The model did not compute a usable embedding.", "The file may be damaged."
        )
    found: NDArray[np.float32] = (vector / size if size else vector).astype(np.float32)
    return found


MAX_NUMBERS = 4 << 20
"""Maximum number of vector elements per `Embed`, as they are sent together."""

Check = Callable[[], None]
"""Raises `Cancelled` once a computation is cancelled."""


class Queries:
    """The part of `engine.api.Model` that answers questions.

    Text queries compute no tokens, so any thread may call them, even while others compute. Other
    queries compute new sequences in the cache's pages while answers are paused.
    """

    info: ModelInfo
    n_ctx: int
    runtime: ThreadRuntime
    scheduler: Scheduler
    _prompts: Prompts
    _occupancy: Occupancy

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            PromptError: the file has none.
        """
        return self._prompts.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or a plain one if it has none.

        Raises:
            PromptError: the file has no vocabulary.
        """
        return self._prompts.template

    @property
    def vision(self) -> VisionInfo | None:
        """Image sizes and limits of the model; None if it cannot see."""
        reader = self._prompts.image_reader
        return None if reader is None else reader.vision

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: whether to add BOS and EOS as the model requires.
            parse_special: whether to parse the spelling of control tokens, such as "<|im_end|>".

        Raises:
            PromptError: the model has no vocabulary.
        """
        self._occupancy.check_open()
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens, with all their spaces, and U+FFFD for invalid bytes.

        Args:
            skip_special: whether to omit control tokens, such as BOS.

        Raises:
            PromptError: the model has no vocabulary, or some ids are not in it.
        """
        self._occupancy.check_open()
        return self.tokenizer.decode(self._known(ids), skip_special, is_tidied=False)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token.

        Raises:
            PromptError: the model has no vocabulary, or some ids are not in it.
        """
        self._occupancy.check_open()
        return [self.tokenizer.token_bytes(token) for token in self._known(ids)]

    def apply_template(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        thinks: bool | None = None, effort: str = "", variables: str = "",
        tools: Sequence[Tool] = (), add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """Return the prompt text for a conversation; see `AnswerRequest`.

        Args:
            add_generation_prompt: whether to end with the start of the assistant's message.

        Raises:
            PromptError: the model has no vocabulary, there are no messages, or its template rejects
                them.
        """
        self._occupancy.check_open()
        return self._prompts.written(
            messages,
            continue_last=continue_last,
            options=PromptOptions.of(thinks, effort, variables, tools),
            add_generation_prompt=add_generation_prompt,
        )

    def chat_size(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        thinks: bool | None = None, effort: str = "", variables: str = "",
        tools: Sequence[Tool] = (), is_cancelled: IsCancelled = never,
    ) -> int:  # fmt: skip
        """Return the number of tokens in a conversation's prompt, including image tokens.

        Args:
            is_cancelled: polled while images are read, on any thread; returning True stops that.

        Raises:
            PromptError: see `apply_template`.
            ImageError: the model cannot see, or an image cannot be used.
        """
        self._occupancy.check_open()
        _ = self._read_images(messages, is_cancelled)  # cached for the prompt
        options = PromptOptions.of(thinks, effort, variables, tools)
        prompt = self._prompts.chat(
            messages, 0, continue_last=continue_last, is_shortened=False, options=options
        )
        return len(prompt.ids)

    def prompt_size(self, prompt: str) -> int:
        """Return the number of tokens in a prompt from `apply_template`."""
        return len(self.prompt_ids(prompt))

    def prompt_ids(self, prompt: str | Sequence[int], n_ctx: int | None = None) -> list[int]:
        """Return the tokens that `Model.generate` continues.

        Args:
            n_ctx: context size; None if the prompt need not fit.

        Raises:
            PromptError: `prompt` is a text and the model has no vocabulary, or it is far too long.
        """
        return self._prompts.plain(prompt, n_ctx).ids

    def count_tokens(
        self, messages: Sequence[ChatMessage] | None, draft: str = "", tools: Sequence[Tool] = (),
        is_cancelled: IsCancelled = never,
    ) -> tuple[int | None, int, int | None]:  # fmt: skip
        """Return the token counts of a chat's next prompt; see `TokensCounted`.

        Args:
            messages: messages before the last one; None to count only the last one, which is quick.
            draft: text of the last message.
            tools: functions that the prompt describes.
            is_cancelled: see `chat_size`.

        Raises:
            PromptError: the model has no vocabulary, or its template rejects these messages.
        """
        self._occupancy.check_open()
        _ = self._read_images(messages or (), is_cancelled)  # cached for the prompt
        return self._prompts.count(messages, draft, tools)

    def _read_images(
        self, messages: Sequence[ChatMessage], is_cancelled: IsCancelled
    ) -> PromptImages:
        reader = self._prompts.image_reader
        return reader.read(messages, is_cancelled) if reader else ()

    def _known(self, ids: Sequence[int]) -> Sequence[int]:
        n_vocab = max(self.info.n_vocab, self.tokenizer.n_vocab)
        if not all(0 <= token < n_vocab for token in ids):
            raise PromptError(
                "Some token ids are outside the range 0 to {n}.",
                "Use this model's token ids.",
                n=n_vocab - 1,
            )
        return ids

    def logits(self, ids: Sequence[int]) -> Logits:
        """Compute the logits after each of `ids`, as a new sequence.

        Returns:
            Logits in F32, (len(ids), n_vocab).

        Raises:
            PromptError: there are no tokens, unknown ones, or too many for the context.
        """
        doing = Sentence("Computing logits"), Sentence("it is computing logits")
        with self._alone(doing, [ids], never, is_noted=True) as (sequence, check):
            return np.concatenate(list(sequence.compute(ids, 0, check, PROMPT_BATCH)))

    def score(
        self, ids: Sequence[int], n_logprobs: int = 0, is_cancelled: IsCancelled = never
    ) -> list[TokenLogprob]:
        """Return the log probability of each of `ids` except the first, given those before it.

        Args:
            n_logprobs: number of likeliest tokens to return at each position, at most 20.
            is_cancelled: polled before each batch; returning True stops the computation.

        Raises:
            EngineError: the tokens or `n_logprobs` cannot be used, or scoring was cancelled.
        """
        check_n_logprobs(n_logprobs)
        found = list[TokenLogprob]()
        doing = Sentence("Scoring"), Sentence("it is scoring text")
        with self._alone(doing, [ids], is_cancelled) as (sequence, check):
            for rows in sequence.compute(ids, 0, check, PROMPT_BATCH):
                following = ids[len(found) + 1 :]
                found += [
                    token_logprob(row, token, n_logprobs)
                    for row, token in zip(rows, following, strict=False)
                ]
        return found

    @property
    def cache_use(self) -> tuple[int, int]:
        """Number of cached tokens in unfinished answers, and of those kept for later prompts."""
        with self._occupancy.use(Sentence("its cache is being counted")):
            return self.scheduler.cache.usage

    def embed(
        self, inputs: Sequence[str | Sequence[int]], is_cancelled: IsCancelled = never
    ) -> Embedded:
        """Compute an embedding, a vector of length 1, for each text.

        It is pooled from the hidden states after the model's final norm as the file specifies, by
        default from the last token. BOS and EOS are added to texts as the model requires, and
        special tokens are parsed.

        Args:
            inputs: texts, or their token ids, which are used as they are.
            is_cancelled: polled before each batch; returning True stops the computation.

        Raises:
            EngineError: the model does not compute embeddings, a text is empty or exceeds the
                context, there are too many texts, or it was cancelled.
        """
        pooling = pooling_of(self.runtime.hp.keys, self.info.name)
        most = max(1, MAX_NUMBERS // self.info.n_embd)
        if len(inputs) > most:
            raise EngineError(
                "{n} texts are too many to embed at once.",
                "Send up to {most} at a time.",
                n=len(inputs),
                most=most,
            )
        prompts = [self._ids_of(one) for one in inputs]
        doing = Sentence("Embedding"), Sentence("it is embedding texts")
        with self._alone(doing, prompts, is_cancelled) as (sequence, check):
            vectors = tuple(_vector(sequence, ids, pooling, check) for ids in prompts)
        return Embedded(vectors, sum(map(len, prompts)))

    def _ids_of(self, text: str | Sequence[int]) -> Sequence[int]:
        if isinstance(text, str):
            return self._prompts.counted(text, self.n_ctx, add_special=True, parse_special=True)
        return text

    @contextmanager
    def _alone(
        self, doing: tuple[str, str], prompts: Sequence[Sequence[int]], is_cancelled: IsCancelled,
        *, is_noted: bool = False,
    ) -> Iterator[tuple[SoloSequence, Check]]:  # fmt: skip
        """Yield an empty sequence, and a check to call before each batch.

        Args:
            doing: activity, for the messages that say it was cancelled or the model is busy.
            prompts: tokens that will be computed.
            is_noted: see `solo_sequence`.

        Raises:
            EngineError: these tokens cannot be computed, or the model has been closed.
        """
        with self._occupancy.use(doing[1], is_cancelled) as is_cancelled:

            def check() -> None:
                if is_cancelled():
                    raise Cancelled(doing[0])

            for ids in prompts:
                self.scheduler.check(ids)
            runner = self.runtime.runner
            with solo_sequence(self.scheduler, runner, is_noted=is_noted) as sequence:
                yield sequence, check


def _vector(
    sequence: SoloSequence, ids: Sequence[int], pooling: Pooling, check: Check
) -> tuple[float, ...]:
    sequence.restart()
    used = ids[:1] if pooling == "first" else ids  # the first token attends only to itself
    first = 0 if pooling == "mean" else len(used) - 1
    states = sequence.compute(used, first, check, PROMPT_BATCH, wants_hidden=True)
    return tuple(float(str(x)) for x in pooled(states, pooling, len(ids)))


def _pieces(model: Queries, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(piece) for piece in model.pieces(ids))


def _template_applied(
    model: Queries, question: ApplyTemplate, is_cancelled: IsCancelled
) -> TemplateApplied:
    prompt = model.apply_template(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        add_generation_prompt=question.add_generation_prompt,
    )  # fmt: skip
    if not has_images(question):
        return TemplateApplied(prompt, model.prompt_size(prompt))
    n_tokens = model.chat_size(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        is_cancelled=is_cancelled,
    )  # fmt: skip
    return TemplateApplied(prompt, n_tokens)


TEXT_QUESTIONS = (CountTokens, Tokenize, Detokenize, ApplyTemplate)
"""Questions that any thread may process, even while tokens are computed."""


def reply_to(model: Queries, question: Question, is_cancelled: IsCancelled) -> Reply:
    """Return a model's reply to a question.

    Args:
        is_cancelled: polled; returning True stops the computation.

    Raises:
        EngineError: the question cannot be answered, or it was cancelled.
    """
    match question:
        case CountTokens(messages, draft, tools):
            return TokensCounted(*model.count_tokens(messages, draft, tools, is_cancelled))
        case Tokenize(text):
            ids = model.tokenize(
                text, add_special=question.add_special, parse_special=question.parse_special
            )
            return Tokenized(tuple(ids), _pieces(model, ids) if question.has_pieces else ())
        case Detokenize(ids):
            text = model.detokenize(ids, skip_special=question.skip_special)
            return Detokenized(text, _pieces(model, ids) if question.has_pieces else ())
        case ApplyTemplate():
            return _template_applied(model, question, is_cancelled)
        case Embed(inputs):
            return model.embed(inputs, is_cancelled)
        case ScoreTokens(text, n):
            ids = model.prompt_ids(text, model.n_ctx)
            return TokensScored(tuple(ids), tuple(model.score(ids, n, is_cancelled)))
        case CountCache():
            return CacheCounted(*model.cache_use)
