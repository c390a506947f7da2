"""Passes over single tokens by their number of tokens: which are recorded, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.model.forward.batch import MOST_AT_ONCE, PassSize
from engine.model.forward.batch_sizes import (
    CAPTURED_ROWS,
    GUESSING_ROWS,
    MOST_GUESSES_CAPTURED,
    MOST_RECORDED,
    captured_rows,
)
from engine.runtime.rank import Captures

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch
    from engine.runtime.rank import GuessSize, Rank


MOST_GUESSES_RECORDED = 6
"""Largest number of sizes of passes over an MTP block that are kept recorded."""


def are_captured(ranks: Sequence[Rank]) -> bool:
    """Return whether any rank captures passes over single tokens, those of other machines too."""
    return any(rank.backend.captures or rank.elsewhere.some for rank in ranks)


def captures_of(ranks: Sequence[Rank]) -> Captures:
    """Return which ranks capture passes over single tokens, those of other machines included."""
    return Captures(
        some=are_captured(ranks),
        all=all((r.is_idle or r.backend.captures) and r.elsewhere.all for r in ranks),
    )


def n_until_recorded(ranks: Sequence[Rank]) -> int:
    """Return the number of passes of one size up to the recorded one, which is included.

    The first one allocates what is kept. A capture computes its tokens without recording first, so
    there it can be the first one.
    """
    return 1 if are_captured(ranks) else 2


class RecordedSizes:
    """Numbers of tokens of the passes that are recorded; the recordings lie in the ranks.

    Attributes:
        n_single: number of passes over single tokens since `clear`, by their size.
        n_guesses: number of passes over MTP blocks since then, by their size.
    """

    def __init__(self) -> None:
        self.n_single = Counter[PassSize]()
        self.n_guesses: Counter[GuessSize] = Counter()
        self._refused: set[PassSize] = set()
        self._refused_guesses: set[GuessSize] = set()
        self._used: list[PassSize] = []  # sizes beside one, the one used last at the end

    def has(self, size: PassSize, ranks: Sequence[Rank]) -> bool:
        """Return whether all ranks have a recording of a size."""
        return all(size in rank.recordings for rank in ranks)

    def is_due(self, size: PassSize, ranks: Sequence[Rank]) -> bool:
        """Return whether a pass of a size, counted already, is to be recorded."""
        return self.n_single[size] == n_until_recorded(ranks) and size not in self._refused

    def note(self, size: PassSize, ranks: Sequence[Rank]) -> None:
        """Note that a recording is used, and drop the one on CPUs that was not used for longest."""
        if size == 1 or are_captured(ranks) or not self.has(size, ranks):
            return
        self._used = [*(used for used in self._used if used != size), size]
        if len(self._used) > MOST_RECORDED:
            dropped = self._used.pop(0)
            self.n_single[dropped] = 0
            for rank in ranks:
                rank.recordings.pop(dropped, None)

    def make_room_for_guesses(self, ranks: Sequence[Rank], block: int) -> None:
        """Drop a block's oldest recordings if there is to be one more than are kept."""
        found = (size for rank in ranks for size in rank.guesses if size[0] == block)
        sizes = list(dict.fromkeys(found))
        for size in sizes[: max(0, len(sizes) + 1 - MOST_GUESSES_RECORDED)]:
            self.n_guesses[size] = 0
            for rank in ranks:
                rank.guesses.pop(size, None)

    def may_capture_guesses(self, size: GuessSize, ranks: Sequence[Rank]) -> bool:
        """Return whether passes over MTP blocks of a size are captured, or may be."""
        known = {found for rank in ranks for found in rank.guesses if found[0] == size[0]}
        has_room = size in known or len(known) < MOST_GUESSES_CAPTURED
        return has_room and size not in self._refused_guesses

    def refuse_guesses(self, size: GuessSize) -> None:
        """Note that passes over MTP blocks of a size cannot be captured, ever."""
        self._refused_guesses.add(size)

    def refuse(self, size: PassSize) -> None:
        """Note that passes of a size cannot be recorded, ever."""
        self._refused.add(size)

    def clear(self, ranks: Sequence[Rank]) -> None:
        """Drop all recordings, and count anew."""
        self.n_single.clear()
        self.n_guesses.clear()
        self._used.clear()
        for rank in ranks:
            rank.recordings.clear()
            rank.guesses.clear()


def size_of(batch: Batch, ranks: Sequence[Rank]) -> PassSize:
    """Return the size by which the recordings of passes like one over single tokens are kept."""
    return batch.captured_size if are_captured(ranks) else len(batch.pieces)


def may_repeat(batch: Batch, ranks: Sequence[Rank], *, can_rewind: bool) -> bool:
    """Return whether a pass computes single tokens as a recording of so many would.

    Args:
        can_rewind: whether there are no recurrent states, which CPUs beside GPUs would change once
            more for each row that `padded` adds.
    """
    pieces = batch.pieces
    if batch.first_logit or batch.wants_hidden or not batch.is_of_singles:
        return False
    if len(pieces) > MOST_AT_ONCE:
        return False
    if can_rewind or not are_captured(ranks):
        return True
    return len(pieces) in CAPTURED_ROWS or captures_of(ranks).all


def padded(ids: Sequence[int], batch: Batch, ranks: Sequence[Rank]) -> tuple[Sequence[int], Batch]:
    """Return single tokens as a size that is captured, by computing the last one repeatedly.

    Its keys and values are written to the same place again; recurrent states change once, see
    `engine.backends.gpu.state_chains`.
    """
    n_more = captured_rows(len(ids)) - len(ids) if are_captured(ranks) else 0
    if not n_more:
        return ids, batch
    pieces = batch.pieces + batch.pieces[-1:] * n_more
    return [*ids, *[ids[-1]] * n_more], batch._replace(pieces=pieces)


def padded_guesses(ids: Sequence[int], batch: Batch) -> tuple[Sequence[int], Batch] | None:
    """Return tokens of a pass over an MTP block as a size that is captured; None if there is none.

    The first token that is only read, and the last one, are computed repeatedly: their keys and
    values are written to the same place again.
    """
    n_read, wanted = batch.first_logit, captured_rows(len(ids) - batch.first_logit)
    n = wanted
    if n_read:
        n = next((size for size in GUESSING_ROWS if size >= n_read + wanted), 0)
    if not n:
        return None
    before, behind = n - n_read - wanted, n_read + wanted - len(ids)
    pieces = batch.pieces[:1] * before + batch.pieces + batch.pieces[-1:] * behind
    wide = batch._replace(pieces=pieces, first_logit=n - wanted)
    return [*[ids[0]] * before, *ids, *[ids[-1]] * behind], wide
