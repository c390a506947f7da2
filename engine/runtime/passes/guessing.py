"""Passes over the MTP block of a model on all ranks, which guess what follows tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from engine.runtime.recording.sizes import are_captured, n_until_recorded

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.batch import Batch
    from engine.parallel.executor import RankExecutor
    from engine.runtime.interface import Guard
    from engine.runtime.rank import Rank
    from engine.runtime.recording.sizes import RecordedSizes
    from engine.sampling.token_source import Logits

T = TypeVar("T")


class GuessPasses(ABC):
    """The part of `ModelRunner` that guesses. The second pass of a size is recorded, as of tokens.

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
    def _read(self, compute: Callable[[], Tensor], read: Callable[[Tensor], T]) -> T:
        """Return what `read` makes of computed logits; recover after any failure."""

    @property
    def guesser(self) -> Self | None:
        """Itself if the model has an MTP block whose passes can be recorded."""
        has_block = bool(self.ranks) and self.ranks[0].model.mtp is not None
        return self if has_block and not are_captured(self.ranks) else None

    def guess(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Return logits of what follows tokens; see `Guesser`."""
        self.check_loaded()
        with self._guard("to guess the next tokens", 1):
            task = self._guess_task(ids, batch)
            return self._read(lambda: self._logits(task), lambda x: x.cpu().numpy())

    def forget_hidden_states(self, seat: int) -> None:
        """Forget the hidden states of a sequence; see `Guesser`."""
        ranks = self.ranks
        with self._guard("to begin a sequence", 1):
            self.executor.run(lambda rank: ranks[rank].context.forget_hidden_states(seat))

    def _guess_task(self, ids: Sequence[int], batch: Batch) -> Callable[[int], Tensor | None]:
        """Return the function that guesses on a rank, given its number."""
        ranks, n = self.ranks, len(ids)
        if all(n in rank.guesses for rank in ranks):
            return lambda rank: ranks[rank].replay_guess(ids, batch)
        self._sizes.n_guesses[n] += 1
        if self._sizes.n_guesses[n] == n_until_recorded(ranks):
            return lambda rank: ranks[rank].record_guess(ids, batch)
        return lambda rank: ranks[rank].guess(ids, batch)
