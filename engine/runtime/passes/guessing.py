"""Passes over the MTP blocks of a model on all ranks, which guess what follows tokens.

A device that samples ahead comes to a stop before a guess, and prompts are not computed in
micro-batches on GPUs. So `--draft auto` loads the blocks on CPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.model.forward.batch import Batch
from engine.runtime.passes.row_sampling import UnreadTokens

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.model.forward.batch import Piece
    from engine.runtime.interface import TokenSource

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
