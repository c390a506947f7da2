"""Questions about a loaded model for which it computes something: logits, embeddings, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import Cancelled, EngineError
from engine.generation.queries.about_text import TextInquiries
from engine.generation.queries.pooling import pooled, pooling_of
from engine.generation.queries.questions import Embedded
from engine.generation.results import TokenLogprob
from engine.generation.scheduling.own import OwnSequence, own_sequence
from engine.generation.scoring import check_n_logprobs, token_logprob
from engine.model.forward.batch_sizes import PROMPT_BATCH
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.decoding.sampling.token_source import Logits
    from engine.generation.queries.pooling import Pooling
    from engine.generation.scheduling.scheduler import Scheduler
    from engine.runtime.thread_runtime import ThreadRuntime

MOST_NUMBERS = 4 << 20
"""Largest number of elements of the vectors of one `Embed`, which are sent at once."""

Check = Callable[[], None]
"""Function that raises `Cancelled` once nobody waits for a computation any more."""


class Inquiries(TextInquiries):
    """The part of `engine.api.Model` that answers questions.

    What it computes for them are fresh sequences in the pages of the cache; answers under way go on
    behind them.
    """

    n_ctx: int
    runtime: ThreadRuntime
    scheduler: Scheduler

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
            return self.scheduler.places.use

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
        most = max(1, MOST_NUMBERS // self.info.n_embd)
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
    ) -> Iterator[tuple[OwnSequence, Check]]:  # fmt: skip
        """Yield an empty sequence, and what to call before each batch.

        Args:
            doing: begin of the sentence that it was cancelled.
            prompts: tokens that will be computed.
            is_noted: see `own_sequence`.

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
            with own_sequence(self.scheduler, runner, is_noted=is_noted) as sequence:
                yield sequence, check


def _vector(
    sequence: OwnSequence, ids: Sequence[int], pooling: Pooling, check: Check
) -> tuple[float, ...]:
    """Return the embedding of tokens; each number has the fewest digits that tell it in F32."""
    sequence.restart()
    wanted = ids[:1] if pooling == "first" else ids  # the first token sees no other
    first = 0 if pooling == "mean" else len(wanted) - 1
    states = sequence.compute(wanted, first, check, PROMPT_BATCH, wants_hidden=True)
    return tuple(float(str(x)) for x in pooled(states, pooling, len(ids)))
