"""What one forward pass computes: tokens of one sequence, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.load_params import MOST_PARALLEL
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor

MOST_AT_ONCE = MOST_PARALLEL
"""Largest number of sequences of which a pass computes a single token each."""

KEPT_STATES = 4 * MOST_AT_ONCE
"""Number of positions of a sequence whose hidden states are kept for an MTP block: those that it
has not read yet, and of a pass of single tokens behind them."""

Tables = tuple[Sequence[int], ...]
"""For each group of layers, the page of each `PAGE` tokens of a sequence."""


class Piece(NamedTuple):
    """Neighbouring tokens of one sequence.

    Attributes:
        n_past: number of the sequence's tokens that are cached already.
        n: number of tokens to compute.
        tables: see `paging.sequences.PagedSequence`; empty for a cache that one sequence has
            alone, where page i is the i-th one.
        slot: place of the sequence's recurrent states behind the tokens.
        seat: number of the sequence among those that run, from 0; where its last hidden states lie.
        shift: what is added to the tokens' numbers for their positions, where there are pictures
            before them that take fewer positions than tokens (M-RoPE).
        source: place of the recurrent states before the tokens, which stay there; None for `slot`.
            Where it is the slot of the piece before, its tokens are those behind that one's.
    """

    n_past: int
    n: int
    tables: Tables = ()
    slot: int = 0
    seat: int = 0
    source: int | None = None
    shift: int = 0

    @property
    def stop(self) -> int:
        """Position after the last of the tokens."""
        return self.n_past + self.n

    @property
    def read_slot(self) -> int:
        """Place of the recurrent states before the tokens."""
        return self.slot if self.source is None else self.source

    def runs(self, group: int, start: int, stop: int) -> list[range]:
        """Return where positions `start` to `stop` lie in a layer's memory: neighbouring slots.

        Args:
            group: number of the layer's group.
        """
        if not self.tables:
            return [range(start, stop)]
        table, found = self.tables[group], list[range]()
        for index in range(start // PAGE, -(-stop // PAGE)):
            begin, end = max(start, index * PAGE), min(stop, (index + 1) * PAGE)
            base = (table[index] - index) * PAGE
            if found and found[-1].stop == base + begin:
                found[-1] = range(found[-1].start, base + end)
            else:
                found.append(range(base + begin, base + end))
        return found


FIRST_TOKEN = Piece(0, 1)
"""Place of the first token of a sequence that has the cache alone."""


Places = tuple[Sequence[int], ...]
"""Time, row and column of some tokens, each as long as there are tokens; or nothing."""


class PictureRows(NamedTuple):
    """Rows of a pass that are of a picture.

    Attributes:
        row: first of these rows.
        features: what they are in place of embeddings, (rows, n_embd), in the host's memory; and
            beside that, what is added behind each of the first blocks, (rows, n_embd) of each.
        whole: first position of the picture and the one behind it, if all of its tokens see each
            other; they are in the pass then. None if each sees what is before it.
        only_in_windows: whether they see each other in layers with a sliding window alone.
    """

    row: int
    features: Tensor
    whole: tuple[int, int] | None = None
    only_in_windows: bool = False

    @property
    def stop(self) -> int:
        """Row after the last of them."""
        return self.row + len(self.features)


class CheckedRows(NamedTuple):
    """Size of a captured pass that checks guesses, apart from those over so many sequences.

    Attributes:
        n: number of rows.
    """

    n: int


PassSize = int | CheckedRows
"""Number of rows of a recorded pass over single tokens, and whether it checks guesses."""


class Batch(NamedTuple):
    """The rows of a forward pass: the tokens of its pieces, one piece after the other.

    The first piece may have any number of tokens, the others have one each.

    Attributes:
        first_logit: first row whose logits are wanted; those of all rows behind it are.
        wants_hidden: whether the hidden states behind the final norm are wanted in their place.
        pictures: rows of the first piece that are of pictures.
        places: time, row and column of each row of the first piece (M-RoPE), if some are of
            pictures; empty where all are the token's number and shift.
    """

    pieces: tuple[Piece, ...]
    first_logit: int
    wants_hidden: bool = False
    pictures: tuple[PictureRows, ...] = ()
    places: Places = ()

    @classmethod
    def of_one(cls, n_past: int, n: int, first_logit: int) -> Batch:
        """Return the batch of a sequence that has the cache alone."""
        return cls((Piece(n_past, n),), first_logit)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(piece.n for piece in self.pieces)

    @property
    def n_wanted(self) -> int:
        """Number of rows whose logits are wanted."""
        return max(0, self.n_rows - self.first_logit)

    def ending(self) -> Batch:
        """Return the rows whose logits are wanted as a batch: the last row, if there are none.

        These are all rows if one of the wanted ones is of a picture, whose tokens may see each
        other.
        """
        n_rows, n = self.n_rows, max(1, self.n_wanted)
        left = n_rows - n
        if not left or any(shown.stop > left for shown in self.pictures):
            return self
        first, *others = self.pieces
        pieces, n_first = tuple(others[-n:]), max(0, n - len(others))
        if n_first:
            pieces = (first._replace(n_past=first.stop - n_first, n=n_first), *others)
        places = tuple(place[-n_first:] for place in self.places) if n_first else ()
        first_logit = max(0, self.first_logit - left)
        return self._replace(pieces=pieces, first_logit=first_logit, pictures=(), places=places)

    @property
    def is_of_singles(self) -> bool:
        """Whether each sequence has a single token, so that the pass can be a recorded one."""
        return not self.pictures and all(piece.n == 1 for piece in self.pieces)

    @property
    def checks_guesses(self) -> bool:
        """Whether a sequence has several pieces: guesses, which the pass checks.

        So do single tokens that an MTP block reads along with its guesses.
        """
        if len(self.pieces) == 1:
            return False
        places = {(piece.seat, piece.n_past) for piece in self.pieces}
        return len(places) > len({piece.seat for piece in self.pieces})

    @property
    def captured_size(self) -> PassSize:
        """Size by which GPUs find the captured pass that computes so many single tokens."""
        return CheckedRows(len(self.pieces)) if self.checks_guesses else len(self.pieces)

    def two_way(self, window: int) -> list[tuple[int, int]]:
        """Return the intervals of positions of the first piece whose tokens see each other.

        Args:
            window: number of tokens that the layer's queries see; 0 for all before them.
        """
        return [
            found.whole
            for found in self.pictures
            if found.whole and (window or not found.only_in_windows)
        ]

    @property
    def is_of_few_singles(self) -> bool:
        """Whether all sequences have a single token, and no more than a recorded pass may have."""
        return len(self.pieces) <= MOST_AT_ONCE and self.is_of_singles
