"""A sequence that is computed alone, without an answer, for measurements or for its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.errors import ContextOverflow
from engine.generation.kv_cache import OutOfPages
from engine.model.forward.batch import Batch, Piece

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.generation.cache_manager import KVCacheManager, SequenceCache
    from engine.generation.scheduler import Scheduler
    from engine.runtime.model_runner import ModelRunner


@contextmanager
def solo_sequence(
    scheduler: Scheduler, runtime: ModelRunner, *, is_noted: bool = True
) -> Iterator[SoloSequence]:
    """Yield an empty sequence; answers are preempted meanwhile.

    Args:
        is_noted: whether it becomes `Scheduler.last`.

    Raises:
        EngineError: a computation failed; everything cached is then forgotten.
    """
    last = scheduler.last
    with scheduler.emptied() as manager:
        solo = SoloSequence(runtime, manager)
        try:
            yield solo
            scheduler.last = solo.ids if is_noted else last
            solo.close()
        except BaseException:
            solo.close(is_kept=False)
            scheduler.forget()
            raise


class SoloSequence:
    """A sequence that has the cache to itself."""

    def __init__(self, runtime: ModelRunner, manager: KVCacheManager) -> None:
        self._runtime, self._manager = runtime, manager
        self.n_ctx = runtime.n_ctx
        self._cache: SequenceCache = manager.allocate(())

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the sequence; reading them stops sampling ahead."""
        self._stop()
        return self._cache.sequence.ids

    def hold(self, ids: Sequence[int]) -> None:
        """Keep as much as possible of the common prefix with `ids`."""
        self._stop()
        if not self._manager.rewind(self._cache, ids) or self._cache.n < len(ids):
            self.close()
            self._cache = self._manager.allocate(ids)

    def restart(self) -> None:
        """Drop all tokens."""
        self.close(is_kept=False)
        self._cache = self._manager.allocate(())

    def keep(self) -> None:
        """Checkpoint the current tokens, so that `hold` can return to them."""
        self._manager.checkpoint(self._cache)

    def compute(
        self, ids: Sequence[int], first_logit: int, check: Callable[[], object] = lambda: None,
        most: int | None = None, *, wants_hidden: bool = False,
    ) -> Iterator[Logits]:  # fmt: skip
        """Compute further tokens; yield logits, batch by batch.

        Args:
            first_logit: index of the first token whose logits are needed.
            check: called before each batch.
            most: maximum number of tokens per batch; None for the runtime's.
            wants_hidden: whether to yield the hidden states after the final norm, (rows, n_embd).
        """
        self._stop()
        step = min(self._runtime.n_batch, most or self._runtime.n_batch)
        for start in range(0, len(ids), step):
            check()
            part = ids[start : start + step]
            piece = self._reserved(len(part))
            first = min(len(part), max(0, first_logit - start))
            batch = Batch((piece,), first, wants_hidden)
            logits = self._runtime.forward(part, batch)
            self._cache.sequence.append(part)
            if len(logits):
                yield logits

    def follow(
        self, token: int, sampler: Sampler, never: Sequence[int], n_left: int
    ) -> int | Logits:
        """Compute a token and sample the next one on a device if possible; see `TokenSource.next`.

        Returns:
            The next token, or logits (n_vocab,) from which to sample it.
        """
        source = self._runtime.token_source
        if source is not None and source.serve(sampler, never):
            result = source.next(token, self._reserved(n_left)._replace(n=1), n_left)
            if result is not None:
                self._cache.sequence.append([token])
                return result
            ids = self._cache.sequence.ids
            self._reopen()
            for _ in self.compute(ids[self._cache.n :], len(ids)):
                raise AssertionError("no logits are requested")
        (row,) = self.compute([token], 0)
        last: Logits = row[0]
        return last

    @contextmanager
    def scratch(self) -> Iterator[Piece]:
        """Yield the position of the next token, which may be computed any number of times."""
        self._stop()
        self.keep()
        try:
            yield self._reserved(1)
        finally:
            self._reopen()

    def close(self, *, is_kept: bool = True) -> None:
        """Free the sequence's cache."""
        self._stop()
        self._manager.free(self._cache, is_kept=is_kept)

    def _reserved(self, n: int) -> Piece:
        cache = self._cache
        try:
            cache.sequence.reserve(n)
        except OutOfPages:
            raise ContextOverflow(
                cache.n + n, cache.n + self._manager.n_free_tokens(cache)
            ) from None
        return cache.piece(n)

    def _stop(self) -> None:
        if self._runtime.token_source is not None and self._runtime.token_source.stop():
            self._reopen()

    def _reopen(self) -> None:
        """Return to a checkpoint, as the current states' contents are unknown."""
        ids = self._cache.sequence.ids
        self._manager.free(self._cache, is_kept=False)
        self._cache = self._manager.allocate(ids)
