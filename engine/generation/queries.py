"""Queries of a loaded model: tokens, prompts, embeddings, probabilities, the cache's use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, EngineError, PromptError
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
    has_pictures,
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
"""Mean of the states of all tokens, the first token's state, or the last token's."""

MEAN, CLS, RANK = 1, 2, 4
BY_NUMBER: dict[int, Pooling] = {-1: "last", 0: "last", MEAN: "mean", CLS: "first", 3: "last"}
"""Pooling by `pooling_type`; -1 and 0 do not say any, as most files, and get the last token's."""


def pooling_of(keys: Keys, name: str) -> Pooling:
    """Return how a model's states are pooled.

    Args:
        keys: metadata of the model's file.
        name: name of the model, for error messages.

    Raises:
        EngineError: the model makes no embeddings, or not from states that see only what is before.
    """
    number = keys.integer("pooling_type", -1)
    if number == RANK:
        raise EngineError(
            f"{name} rates how well texts fit together; it makes no embeddings.",
            "Load an embedding model.",
        )
    if number not in BY_NUMBER:
        raise EngineError(
            f"{name} makes embeddings in a way that is not known ({number}).",
            "Load another embedding model.",
        )
    if not keys.flag("attention.causal", True):
        raise EngineError(
            f"{name} reads texts in both directions, which Tandem does not do.",
            "Load an embedding model that reads from left to right, such as Qwen3-Embedding.",
        )
    return BY_NUMBER[number]


def pooled(states: Iterable[NDArray[np.float32]], pooling: Pooling, n: int) -> NDArray[np.float32]:
    """Return the vector of a text, of length 1, (n_embd,).

    Args:
        states: hidden states of its tokens (rows, n_embd), in several parts; the last token's are
            enough if that is what counts, the first token's likewise.
        n: number of its tokens.

    Raises:
        EngineError: the states are no numbers.
    """
    parts = [part.astype(np.float64) for part in states]
    if pooling == "mean":
        vector = np.sum([part.sum(0) for part in parts], 0) / n
    else:
        vector = parts[0][0] if pooling == "first" else parts[-1][-1]
    size = float(np.linalg.norm(vector))
    if not np.isfinite(size):
        raise EngineError("The model gives a text no usable embedding.", "The file may be damaged.")
    found: NDArray[np.float32] = (vector / size if size else vector).astype(np.float32)
    return found


MAX_NUMBERS = 4 << 20
"""Largest number of elements of the vectors of one `Embed`, which are sent at once."""

Check = Callable[[], None]
"""Function that raises `Cancelled` once nobody waits for a computation any more."""


class Queries:
    """The part of `engine.api.Model` that answers questions.

    Those about text compute no tokens: any thread may ask them, also while others compute. What is
    computed for the others are fresh sequences in the pages of the cache; answers under way go on
    behind them.
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
        """Sizes by which the model sees images; None if it sees none."""
        reader = self._prompts.pictures
        return None if reader is None else reader.vision

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: whether to add BOS and EOS where the model wants them.
            parse_special: whether to read the spelling of a control token, such as "<|im_end|>",
                as that token.

        Raises:
            PromptError: the model has no vocabulary.
        """
        self._occupancy.check_open()
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens, with all their spaces, and U+FFFD for invalid bytes.

        Args:
            skip_special: whether to leave out control tokens, such as BOS.

        Raises:
            PromptError: the model has no vocabulary, or no such tokens.
        """
        self._occupancy.check_open()
        return self.tokenizer.decode(self._known(ids), skip_special, is_tidied=False)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds to a text.

        Raises:
            PromptError: the model has no vocabulary, or no such tokens.
        """
        self._occupancy.check_open()
        return [self.tokenizer.token_bytes(token) for token in self._known(ids)]

    def apply_template(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        thinks: bool | None = None, effort: str = "", variables: str = "",
        tools: Sequence[Tool] = (), add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """Return the text of a conversation's prompt; see `AnswerRequest`.

        Args:
            add_generation_prompt: whether to end where the assistant begins to speak.

        Raises:
            PromptError: the model has no vocabulary, there are no messages, or its template does
                not take them.
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
        """Return the number of tokens of a conversation's prompt, those of images among them.

        Args:
            is_cancelled: asked while images are read, on any thread; returning True ends that.

        Raises:
            PromptError: see `apply_template`.
            ImageError: the model cannot see, or an image cannot be used.
        """
        self._occupancy.check_open()
        _ = self._read_images(messages, is_cancelled)  # held meanwhile
        options = PromptOptions.of(thinks, effort, variables, tools)
        prompt = self._prompts.chat(
            messages, 0, continue_last=continue_last, is_shortened=False, options=options
        )
        return len(prompt.ids)

    def prompt_size(self, prompt: str) -> int:
        """Return the number of tokens of a prompt from `apply_template`."""
        return len(self.prompt_ids(prompt))

    def prompt_ids(self, prompt: str | Sequence[int], n_ctx: int | None = None) -> list[int]:
        """Return the tokens that `Model.generate` goes on with.

        Args:
            n_ctx: size of the context; None for a prompt that need not fit.

        Raises:
            PromptError: the model has no vocabulary for a text, or it is far too long.
        """
        return self._prompts.plain(prompt, n_ctx).ids

    def count_tokens(
        self, messages: Sequence[ChatMessage] | None, draft: str = "", tools: Sequence[Tool] = (),
        is_cancelled: IsCancelled = never,
    ) -> tuple[int | None, int, int | None]:  # fmt: skip
        """Return the tokens of a chat's next prompt, see `TokensCounted`.

        Args:
            messages: messages before the last one; None to count that alone, which is quick.
            draft: text of the last message.
            tools: functions that the prompt describes.
            is_cancelled: see `chat_size`.

        Raises:
            PromptError: the model has no vocabulary, or its template refuses these messages.
        """
        self._occupancy.check_open()
        _ = self._read_images(messages or (), is_cancelled)  # held meanwhile
        return self._prompts.count(messages, draft, tools)

    def _read_images(
        self, messages: Sequence[ChatMessage], is_cancelled: IsCancelled
    ) -> PromptImages:
        """Read the images of a conversation before the model is used, which may take seconds."""
        reader = self._prompts.pictures
        return reader.read(messages, is_cancelled) if reader else ()

    def _known(self, ids: Sequence[int]) -> Sequence[int]:
        """Return token ids that the model has.

        Raises:
            PromptError: it has not all of them.
        """
        n_vocab = max(self.info.n_vocab, self.tokenizer.n_vocab)
        if not all(0 <= token < n_vocab for token in ids):
            raise PromptError(
                f"There are token ids outside 0 to {n_vocab - 1}.", "Use ids of this model."
            )
        return ids

    def logits(self, ids: Sequence[int]) -> Logits:
        """Compute the logits after each of `ids`, a fresh sequence, whatever is cached.

        Returns:
            Logits in F32, (len(ids), n_vocab).

        Raises:
            PromptError: no tokens, unknown tokens, or more than the context holds.
        """
        with self._alone("Computing logits", [ids], never, is_noted=True) as (sequence, check):
            return np.concatenate(list(sequence.compute(ids, 0, check, PROMPT_BATCH)))

    def score(
        self, ids: Sequence[int], n_logprobs: int = 0, is_cancelled: IsCancelled = never
    ) -> list[TokenLogprob]:
        """Return how likely each of `ids` but the first was behind those before it.

        Args:
            n_logprobs: number of likeliest tokens to name at each place, 20 at most.
            is_cancelled: asked before each batch; returning True ends it.

        Raises:
            EngineError: tokens that cannot be computed, too many likeliest ones, or cancelled.
        """
        check_n_logprobs(n_logprobs)
        found = list[TokenLogprob]()
        with self._alone("Scoring", [ids], is_cancelled) as (sequence, check):
            for rows in sequence.compute(ids, 0, check, PROMPT_BATCH):
                following = ids[len(found) + 1 :]
                found += [
                    token_logprob(row, token, n_logprobs)
                    for row, token in zip(rows, following, strict=False)
                ]
        return found

    @property
    def cache_use(self) -> tuple[int, int]:
        """Numbers of tokens in the cache: of answers under way, and kept for later prompts."""
        with self._occupancy.use("its cache is being counted"):
            return self.scheduler.cache.usage

    def embed(
        self, inputs: Sequence[str | Sequence[int]], is_cancelled: IsCancelled = never
    ) -> Embedded:
        """Compute a vector of length 1 for each text: its embedding.

        It is pooled from the hidden states behind the model's final norm as the file says, or is
        the last token's where the file says nothing. A text gets the BOS and EOS that the model
        wants, and the spelling of a special token is that token.

        Args:
            inputs: texts, or their token ids, which are taken as they are.
            is_cancelled: asked before each batch; returning True ends it.

        Raises:
            EngineError: the model makes no embeddings, a text is empty or does not fit into the
                context, there are too many, or it was cancelled.
        """
        pooling = pooling_of(self.runtime.hp.keys, self.info.name)
        most = max(1, MAX_NUMBERS // self.info.n_embd)
        if len(inputs) > most:
            raise EngineError(
                f"{len(inputs)} texts are too many to be embedded at once.",
                f"Send up to {most} at a time.",
            )
        prompts = [self._ids_of(one) for one in inputs]
        with self._alone("Embedding", prompts, is_cancelled) as (sequence, check):
            vectors = tuple(_vector(sequence, ids, pooling, check) for ids in prompts)
        return Embedded(vectors, sum(map(len, prompts)))

    def _ids_of(self, text: str | Sequence[int]) -> Sequence[int]:
        if isinstance(text, str):
            return self._prompts.counted(text, self.n_ctx, add_special=True, parse_special=True)
        return text

    @contextmanager
    def _alone(
        self, doing: str, prompts: Sequence[Sequence[int]], is_cancelled: IsCancelled, *,
        is_noted: bool = False,
    ) -> Iterator[tuple[SoloSequence, Check]]:  # fmt: skip
        """Yield an empty sequence, and what to call before each batch.

        Args:
            doing: begin of the sentence that it was cancelled.
            prompts: tokens that will be computed.
            is_noted: see `solo_sequence`.

        Raises:
            EngineError: these tokens cannot be computed, or the model has been closed.
        """
        with self._occupancy.use(f"it is {doing.lower()}", is_cancelled) as is_cancelled:

            def check() -> None:
                if is_cancelled():
                    raise Cancelled(doing)

            for ids in prompts:
                self.scheduler.check(ids)
            runner = self.runtime.runner
            with solo_sequence(self.scheduler, runner, is_noted=is_noted) as sequence:
                yield sequence, check


def _vector(
    sequence: SoloSequence, ids: Sequence[int], pooling: Pooling, check: Check
) -> tuple[float, ...]:
    """Return the embedding of tokens; each number has the fewest digits that tell it in F32."""
    sequence.restart()
    wanted = ids[:1] if pooling == "first" else ids  # the first token sees no other
    first = 0 if pooling == "mean" else len(wanted) - 1
    states = sequence.compute(wanted, first, check, PROMPT_BATCH, wants_hidden=True)
    return tuple(float(str(x)) for x in pooled(states, pooling, len(ids)))


Answering = Callable[["Queries", Any, "IsCancelled"], Reply]
"""Function that returns a model's reply to a question; it may end as cancelled."""


def _counted(model: Queries, question: CountTokens, is_cancelled: IsCancelled) -> TokensCounted:
    counts = model.count_tokens(question.messages, question.draft, question.tools, is_cancelled)
    return TokensCounted(*counts)


def _tokenized(model: Queries, question: Tokenize, _: IsCancelled) -> Tokenized:
    ids = model.tokenize(
        question.text, add_special=question.add_special, parse_special=question.parse_special
    )
    return Tokenized(tuple(ids), _pieces(model, ids) if question.has_pieces else ())


def _detokenized(model: Queries, question: Detokenize, _: IsCancelled) -> Detokenized:
    text = model.detokenize(question.ids, skip_special=question.skip_special)
    return Detokenized(text, _pieces(model, question.ids) if question.has_pieces else ())


def _pieces(model: Queries, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(piece) for piece in model.pieces(ids))


def _applied(model: Queries, question: ApplyTemplate, is_cancelled: IsCancelled) -> TemplateApplied:
    prompt = model.apply_template(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        add_generation_prompt=question.add_generation_prompt,
    )  # fmt: skip
    if not has_pictures(question):
        return TemplateApplied(prompt, model.prompt_size(prompt))
    n_tokens = model.chat_size(
        question.messages, continue_last=question.continue_last, thinks=question.thinks,
        effort=question.effort, variables=question.variables, tools=question.tools,
        is_cancelled=is_cancelled,
    )  # fmt: skip
    return TemplateApplied(prompt, n_tokens)


def _embedded(model: Queries, question: Embed, is_cancelled: IsCancelled) -> Embedded:
    return model.embed(question.inputs, is_cancelled)


def _scored(model: Queries, question: ScoreTokens, is_cancelled: IsCancelled) -> TokensScored:
    ids = model.prompt_ids(question.text, model.n_ctx)
    return TokensScored(tuple(ids), tuple(model.score(ids, question.n_logprobs, is_cancelled)))


def _cache_counted(model: Queries, question: CountCache, _: IsCancelled) -> CacheCounted:
    return CacheCounted(*model.cache_use)


BESIDE = (CountTokens, Tokenize, Detokenize, ApplyTemplate)
"""Questions that any thread may answer, also while tokens are computed."""

ANSWERING: Mapping[type, Answering] = MappingProxyType(
    {
        CountTokens: _counted,
        Tokenize: _tokenized,
        Detokenize: _detokenized,
        ApplyTemplate: _applied,
        Embed: _embedded,
        ScoreTokens: _scored,
        CountCache: _cache_counted,
    }
)
"""Functions that answer, by the class of the question."""


def reply_to(model: Queries, question: Question, is_cancelled: IsCancelled) -> Reply:
    """Return a model's reply to a question.

    Args:
        is_cancelled: asked again and again; returning True ends what is computed for it.

    Raises:
        EngineError: the question cannot be answered, or it was cancelled.
    """
    return ANSWERING[type(question)](model, question, is_cancelled)
