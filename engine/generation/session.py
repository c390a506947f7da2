"""The tokens in a model's KV cache, and the ways to add and to remove some."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.errors import PromptError
from engine.forward.batch import Batch, Piece
from engine.generation.work import check_prompt
from engine.paging.alone import is_kept, tables_alone
from engine.runtime.timeline import TokenTimes, timed

if TYPE_CHECKING:
    from engine.runtime.interface import Runtime
    from engine.sampling.sampler import Sampler
    from engine.sampling.token_source import Logits


UNKNOWN = -1
"""Token id that stands for a cached token whose id is not known."""


CURRENT, SAVED = 0, 1
"""Places of the recurrent states of the cached tokens, and of those to which it can go back."""


class Session:
    """The tokens in the KV cache of a runtime; all tokens are computed through it.

    Each use of the cache is a turn, numbered by `begin`: a turn that another one has interrupted
    cannot go on. A token source on the device may compute tokens ahead of their reader; those that
    nobody has read are called "beyond" here.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.n_ctx = runtime.n_ctx  # another split does not change it
        self._ids: list[int] = []
        self._n_beyond = 0
        self._saved: list[int] = []
        self._turn = 0
        self._sampled_at: float | None = None
        self._is_unfinished = False

    @property
    def ids(self) -> list[int]:
        """Ids of the cached tokens; asking ends computing ahead, so that they stay as they are."""
        self._halt()
        return self._ids

    @property
    def n_saved(self) -> int:
        """Number of cached tokens that the saved recurrent states stand for; 0 for none."""
        n = len(self._saved)
        return n if self._ids[:n] == self._saved else 0

    def check(self, ids: Sequence[int]) -> None:
        """Check that a prompt can be computed.

        Raises:
            PromptError: no tokens, tokens that the model does not have, or more than fit.
        """
        check_prompt(ids, self._runtime.n_vocab, self.n_ctx)

    def begin(self) -> int:
        """Begin a turn and return its number; an earlier turn cannot go on after that."""
        self._halt()
        self._n_beyond = 0
        self._turn += 1
        return self._turn

    def _halt(self) -> None:
        """End computing ahead, and wait for tokens whose logits nobody has read."""
        self._stop_ahead()
        if self._is_unfinished:
            with self._forgetting():
                self._runtime.finish()
            self._is_unfinished = False

    def _stop_ahead(self) -> None:
        """End computing ahead; note the tokens that were computed ahead and stay in the cache."""
        self._sampled_at = None
        if self._runtime.token_source is not None:
            beyond = self._runtime.token_source.stop()
            self._ids.extend(beyond)
            self._n_beyond += len(beyond)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forget all cached tokens and the saved state if a call on the runtime fails."""
        try:
            yield
        except BaseException:
            self._ids.clear()
            self._saved, self._is_unfinished = [], False
            raise

    def keep_common(self, ids: Sequence[int]) -> int:
        """Drop the cached tokens after the common prefix with `ids`; return the prefix's length.

        The last token of `ids` never counts, as its logits are wanted. A recurrent state cannot be
        cut; it goes back to where it was saved, or to the start.
        """
        self._halt()
        self._n_beyond = n = 0
        limit = min(len(self._ids), len(ids) - 1)
        while n < limit and self._ids[n] == ids[n]:
            n += 1
        if n < len(self._ids) and not self._runtime.can_rewind:
            n = self._go_back(n)
        groups, n_computed = self._runtime.groups, len(self._ids)
        if not all(is_kept(g.n_pages, g.sight, n_computed, n) for g in groups):
            n = 0
        del self._ids[n:]
        return n

    def place(self, n_past: int, n: int) -> Piece:
        """Return the place of n tokens behind the first `n_past`."""
        n_pages = [group.n_pages for group in self._runtime.groups]
        return Piece(n_past, n, tables_alone(n_pages, n_past + n))

    def _go_back(self, n: int) -> int:
        """Restore the saved recurrent state if it is of `n` tokens or fewer; return of how many."""
        n_saved, found = len(self._saved), self._ids
        self._ids = []  # until the state is whole again
        if not 0 < n_saved <= n or found[:n_saved] != self._saved:
            return 0
        self._runtime.move_slot(SAVED, CURRENT)
        self._ids = found
        return n_saved

    def save(self) -> None:
        """Save the recurrent states, so that they can go back to the tokens cached now."""
        if not self._runtime.can_rewind and self._ids:
            self._saved = []  # until the copy is whole
            self._runtime.move_slot(CURRENT, SAVED)
            self._saved = list(self._ids)

    def forward(self, ids: Sequence[int], first_logit: int, turn: int) -> Logits:
        """Compute `ids` after the cached tokens; see `Runtime.forward`.

        Raises:
            PromptError: another turn has begun since `turn`.
        """
        self.check_turn(turn)
        with self._forgetting():
            self._stop_ahead()
            n_past = len(self._ids)
            piece = self.place(n_past, len(ids))
            batch = Batch((piece,), first_logit)
            logits = self._runtime.forward(ids, batch)
        self._is_unfinished = first_logit >= len(ids)
        self._ids.extend(ids)
        return logits

    @property
    def n_running(self) -> int:
        """Number of cached tokens that devices have not computed yet."""
        with self._forgetting():
            return self._runtime.n_running

    def check_turn(self, turn: int) -> None:
        """Check that a turn can go on.

        Raises:
            PromptError: another one has begun since.
        """
        if turn != self._turn:
            raise PromptError(
                "The model was asked something else in the meantime.", "Ask once more."
            )

    def follow(
        self, token: int, sampler: Sampler, never: Sequence[int], n_left: int, turn: int
    ) -> int | Logits:
        """Compute one token, and sample the next one if the runtime can.

        Args:
            never, n_left: see `TokenSource`.

        Returns:
            The sampled token, or the logits (n_vocab,) to sample it from.

        Raises:
            PromptError: see `forward`.
        """
        self.check_turn(turn)
        if self._n_beyond:
            return self._follow_again(token, turn)
        stream = self._runtime.token_source
        if stream is None or not stream.serve(sampler, never):
            row: Logits = self.forward([token], 0, turn)[0]
            return row
        n_past = len(self._ids)
        try:
            found = stream.next(token, self.place(n_past, 1), min(n_left, self.n_ctx - n_past))
        except BaseException:
            self._ids.clear()
            raise
        if found is None:
            self._ids.append(UNKNOWN)
            self._n_beyond = 1
            return self._follow_again(token, turn)
        self._ids.append(token)
        self._sampled_at = time.perf_counter() if isinstance(found, int) else None
        return found

    def _follow_again(self, token: int, turn: int) -> Logits:
        """Return the logits after a token, where the cache holds more than an answer has read."""
        whole = [*self._ids[: -self._n_beyond], token]
        self.keep_common(whole)
        for chunk, first_logit in self.chunks(whole):
            logits = self.forward(chunk, first_logit, turn)
        row: Logits = logits[0]
        return row

    def timed(
        self, token: int, sampler: Sampler, never: Sequence[int], n_left: int, turn: int
    ) -> tuple[int | Logits, TokenTimes]:
        """Compute one token as `follow` does, and measure it.

        Where tokens are sampled ahead, its time is counted from the moment at which the token
        before was read, as this one was computed meanwhile.
        """
        at = len(self._ids)
        return timed(
            self._runtime.ranks,
            at,
            lambda: self.follow(token, sampler, never, n_left, turn),
            self._sampled_at,
        )

    def chunks(
        self, ids: Sequence[int], most: int | None = None
    ) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the tokens of `ids` that are not cached, in batches.

        Each comes with the index of its first token whose logits are needed if only those of the
        last of `ids` are: its length in all batches but the last. Before the last token a recurrent
        state is saved, so that a prompt with the same beginning can go on from there.

        Args:
            most: largest number of tokens of a batch; None for the runtime's.
        """
        step, stop = min(self._runtime.n_batch, most or len(ids)), len(ids)
        if not self._runtime.can_rewind:
            stop -= 1
        for start in range(len(self._ids), stop, step):
            chunk = ids[start : min(start + step, stop)]
            yield chunk, len(chunk) - (start + len(chunk) == len(ids))
        if stop < len(ids):
            self.save()
            yield ids[stop:], 0
