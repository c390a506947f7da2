"""Passes over the MTP blocks of a model on all ranks, which guess what follows tokens.

A device that samples ahead comes to a stop before a guess, and prompts are not computed in
micro-batches on GPUs. So `--draft auto` loads the blocks on CPUs alone.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from engine.model.forward.batch import Batch
from engine.runtime.passes.row_sampling import UnreadTokens
from engine.runtime.rank import Replay
from engine.runtime.recording import are_captured, n_until_recorded, padded_guesses

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.model.forward.batch import Piece
    from engine.runtime.interface import Guard, TokenSource
    from engine.runtime.passes.row_sampling import Reading
    from engine.runtime.rank import GuessSize, Rank
    from engine.runtime.recording import RecordedSizes

MOST_AHEAD = 8
"""Number of tokens that a source runs ahead of its reader, at most, and one that it cannot undo:
their hidden states take the places of unread ones."""


class NotedSource:
    """A token source whose tokens are noted, so that an MTP block can read them.

    Before hidden states are lost that it has not read, the source pauses and the block reads.

    Args:
        source: samples the tokens.
        unread: what the block has not read.
        read: has the block read what it must before a pass.
    """

    def __init__(
        self, source: TokenSource, unread: UnreadTokens, read: Callable[[Batch], None]
    ) -> None:
        self._source, self._unread, self._read = source, unread, read
        self._last: Piece | None = None

    @property
    def waited_s(self) -> float:
        return self._source.waited_s

    @property
    def is_beyond(self) -> bool:
        return self._source.is_beyond

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        return self._source.serve(sampler, never)

    def next(self, token: int, piece: Piece, n_left: int) -> int | Logits | None:
        """Run a token, and sample the next one; see `TokenSource.next`."""
        if self._unread.is_due(piece, MOST_AHEAD) and self._source.hold(MOST_AHEAD):
            self._read(Batch((piece,), 0))
        found = self._source.next(token, piece, n_left)
        if found is not None:
            self._unread.note([token], Batch((piece,), 0))
        self._last = piece
        return found

    def hold(self, n: int) -> bool:
        return self._source.hold(n)

    def stop(self) -> Sequence[int]:
        """Stop the source; note the tokens that it has run and cannot undo."""
        found = self._source.stop()
        for token in found:
            assert self._last is not None, "they follow a token that was run"
            self._last = self._last._replace(n_past=self._last.stop)
            self._unread.note([token], Batch((self._last,), 0))
        return found


T = TypeVar("T")

log = logging.getLogger(__name__)


class GuessPasses(ABC):
    """The part of `ModelRunner` that guesses.

    The second pass of a size is recorded, and the first one is captured on GPUs, as of tokens. A
    pass of guesses first reads the tokens that were computed one by one since the last one.

    Attributes:
        executor: executor of the ranks.
        ranks: the ranks, in rank order; empty once closed.
    """

    executor: RankExecutor
    ranks: list[Rank]
    _guard: Guard
    _sizes: RecordedSizes

    @abstractmethod
    def check_loaded(self) -> None:
        """Check that there are ranks."""

    @abstractmethod
    def _logits(self, compute: Callable[[int], Tensor | None]) -> Tensor:
        """Compute on all ranks; return the logits, which exactly one rank returns."""

    @abstractmethod
    def _repeated(self, replays: Sequence[Replay], ids: Sequence[int], batch: Batch) -> Tensor:
        """Replay what each rank has captured, for other tokens; return the logits."""

    @abstractmethod
    def _captured(self, task: Callable[[Rank], CaptureTask]) -> tuple[Sequence[Replay], Tensor]:
        """Compute each rank's task and capture it; return the captures, and the logits."""

    @abstractmethod
    def _read(self, compute: Callable[[], Tensor], read: Callable[[Tensor], T]) -> T:
        """Return what `read` makes of computed logits; recover after any failure."""

    @abstractmethod
    def _recovering(self) -> AbstractContextManager[None]:
        """Return a context that recovers after any failure."""

    @abstractmethod
    def _rehearsed(self, compute: Callable[[], Tensor]) -> bool:
        """Compute while no kernel waits for another rank; return whether any could wait."""

    @property
    def guesser(self) -> Self | None:
        """Itself if the model has an MTP block."""
        return self if self._n_blocks else None

    @property
    def most_guesses(self) -> int:
        """Largest number of guesses in a row: as many as there are blocks; 0 for any number."""
        return self._n_blocks if self._n_blocks > 1 else 0

    @property
    def _n_blocks(self) -> int:
        return self.ranks[0].model.hp.n_mtp if self.ranks else 0

    @cached_property
    def _unread(self) -> UnreadTokens:
        return UnreadTokens(self._n_blocks)

    def noted(self, source: TokenSource) -> TokenSource:
        """Return a source of tokens that the MTP blocks are going to read, if there are some."""
        if self.guesser is None:
            return source
        me = weakref.ref(self)  # which has the source, too
        return NotedSource(source, self._unread, lambda batch: _read_due(me(), batch))

    def guess(self, ids: Sequence[int], batch: Batch, number: int = 0) -> Logits:
        """Return logits of what follows tokens; see `Guesser`."""
        self.check_loaded()
        with self._guard("to guess the next tokens", 1):
            before, (block, rows) = self._unread.joined(ids, batch, number)
            self._read_tokens(before)
            found = self._read(lambda: self._guessed(*rows, block), lambda x: x.cpu().numpy())
            self._unread.note_guess(batch, number)
            return found

    @contextmanager
    def _noted(self, ids: Sequence[int], batch: Batch) -> Iterator[None]:
        """Enter a pass over the blocks before the MTP blocks, if there are some that guess."""
        if self.guesser is None:
            yield
            return
        self._read_tokens(self._unread.due(batch))
        yield
        self._unread.note(ids, batch)

    def _read_tokens(self, passes: Iterable[Reading]) -> None:
        ranks = self.ranks
        for block, (ids, batch) in passes:
            tokens = torch.tensor(ids)
            with self._recovering():
                self.executor.run(partial(_read_on, ranks, tokens, batch, block), is_watched=True)

    def forget_hidden_states(self, seat: int) -> None:
        """Forget the hidden states of a sequence; see `Guesser`."""
        ranks = self.ranks
        self._unread.forget(seat)
        with self._guard("to begin a sequence", 1):
            self.executor.run(lambda rank: ranks[rank].context.forget_hidden_states(seat))

    def _guessed(self, ids: Sequence[int], batch: Batch, block: int) -> Tensor:
        """Have a block guess on all ranks; return the logits of the rows that want some."""
        wide = padded_guesses(ids, batch) if are_captured(self.ranks) else None
        if wide is not None:
            size = block, len(wide[0]), wide[1].first_logit
            if self._sizes.may_capture_guesses(size, self.ranks):
                found = self._replayed_guess(*wide, size)
                if found is not None:
                    return found[: len(ids) - batch.first_logit]
        return self._logits(self._guess_task(ids, batch, block))

    def _replayed_guess(self, ids: Sequence[int], batch: Batch, size: GuessSize) -> Tensor | None:
        """Guess by a captured pass, or capture it; return the logits, None if that cannot be."""
        ranks, block = self.ranks, size[0]
        found = [rank.guesses.get(size) for rank in ranks]
        replays = [replay for replay in found if isinstance(replay, Replay)]
        if len(replays) == len(ranks):
            return self._repeated(replays, ids, batch)
        from engine.backends.gpu.launch.graph import NotRepeatable

        try:
            made, logits = self._captured(lambda rank: rank.guess_capture_task(ids, batch, block))
        except NotRepeatable as error:
            log.warning("guesses from %d tokens are computed step by step: %s", len(ids), error)
            self._sizes.refuse_guesses(size)
            return None
        for rank, replay in zip(ranks, made, strict=True):
            rank.guesses[size] = replay
        return logits

    def _guess_task(
        self, ids: Sequence[int], batch: Batch, block: int
    ) -> Callable[[int], Tensor | None]:
        """Return the function that has a block guess on a rank, given its number."""
        ranks, size = self.ranks, (block, len(ids), batch.first_logit)
        if are_captured(ranks):
            task = partial(_guess_on, ranks, ids, batch, block)
            self._sizes.n_guesses[size] += 1
            if self._sizes.n_guesses[size] == 1:
                self._rehearsed(lambda: self._logits(task))
            return task
        if all(size in rank.guesses for rank in ranks):
            return lambda rank: ranks[rank].replay_guess(ids, batch, block)
        self._sizes.n_guesses[size] += 1
        if self._sizes.n_guesses[size] == n_until_recorded(ranks):
            self._sizes.make_room_for_guesses(ranks, block)
            return lambda rank: ranks[rank].record_guess(ids, batch, block)
        return lambda rank: ranks[rank].guess(ids, batch, block)


def _read_due(passes: GuessPasses | None, batch: Batch) -> None:
    """Have MTP blocks read what tokens that a device samples ahead would take the places of."""
    if passes is not None:
        with passes._guard("to compute the next tokens", 1):
            passes._read_tokens(passes._unread.due(batch, MOST_AHEAD))


def _guess_on(
    ranks: Sequence[Rank], ids: Sequence[int], batch: Batch, block: int, rank: int
) -> Tensor | None:
    """Have a rank, given its number, guess step by step."""
    return ranks[rank].guess(ids, batch, block)


def _read_on(ranks: Sequence[Rank], tokens: Tensor, batch: Batch, block: int, rank: int) -> None:
    """Have a rank, given its number, read tokens."""
    ranks[rank].read(tokens, batch, block)
