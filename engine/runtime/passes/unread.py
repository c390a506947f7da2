"""Tokens that a model has computed and its MTP block has not read yet.

The block reads a prompt along with the blocks before it. Tokens that are computed one by one it
reads when it guesses next, so that it takes no time where nobody wants guesses; or before more
hidden states are needed than are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.forward.batch import KEPT_STATES, MOST_AT_ONCE, Batch, Piece
from engine.paging.keys import PAGE
from engine.paging.sequences import GONE

Rows = tuple[Sequence[int], Batch]
"""Tokens, and the pass that reads them."""


class UnreadTokens:
    """The unread tokens of all sequences, by their seats (`Piece.seat`)."""

    def __init__(self) -> None:
        self._of: dict[int, _Unread] = {}

    def forget(self, seat: int) -> None:
        """Forget the tokens of a sequence."""
        self._of.pop(seat, None)

    def note(self, ids: Sequence[int], batch: Batch) -> None:
        """Note a pass over the model's other blocks."""
        row, is_kept = 0, batch.is_of_few_singles
        for piece in batch.pieces:
            unread = self._of.setdefault(piece.seat, _Unread())
            is_of_picture = row == 0 and bool(batch.pictures)  # its id stands for no token
            if is_kept or (piece.n == 1 and not is_of_picture):
                unread.add(piece.n_past, ids[row])
            else:
                unread.begin(piece.stop)
            row += piece.n

    def is_due(self, piece: Piece, n_ahead: int = 0) -> bool:
        """Return whether a single token needs places of hidden states that are not read.

        Args:
            n_ahead: number of tokens behind it that may be computed along with it.
        """
        unread = self._of.get(piece.seat)
        return unread is not None and piece.stop + n_ahead - unread.n_read >= KEPT_STATES

    def due(self, batch: Batch, n_ahead: int = 0) -> Iterator[Rows]:
        """Yield what has to be read before a pass, as hidden states would be lost.

        Args:
            n_ahead: see `is_due`.
        """
        firsts = {piece.seat: piece for piece in reversed(batch.pieces)}
        stops = {piece.seat: piece.stop for piece in batch.pieces}
        for seat, piece in firsts.items():
            unread = self._of.get(seat)
            if unread is None:
                continue
            if piece.n > 1 or stops[seat] + n_ahead - unread.n_read >= KEPT_STATES:
                rest = unread.rows(piece)
                unread.note_guess(piece.n_past, None)
                if rest[0]:
                    yield rest

    def joined(self, ids: Sequence[int], batch: Batch) -> tuple[list[Rows], Rows]:
        """Return what has to be read before guesses, and their pass, which reads the rest.

        Args:
            ids: token of each sequence that is computed next, or that was guessed.
            batch: places of these tokens.
        """
        rests = [rest for piece in batch.pieces if (rest := self._rest(piece))[0]]
        if len(ids) + sum(len(tokens) for tokens, _ in rests) > MOST_AT_ONCE:
            return rests, (ids, batch)
        unread = [token for tokens, _ in rests for token in tokens]
        places = [single for _, rest in rests for single in _singles(rest.pieces[0])]
        return [], ([*unread, *ids], Batch((*places, *batch.pieces), len(unread)))

    def _rest(self, piece: Piece) -> Rows:
        """Return the unread tokens right before a token of a sequence."""
        return self._of.get(piece.seat, _Unread()).rows(piece)

    def note_guess(self, ids: Sequence[int], batch: Batch) -> None:
        """Note that the block has read all before some tokens, and guessed what follows them."""
        for token, piece in zip(ids, batch.pieces, strict=True):
            if (unread := self._of.get(piece.seat)) is not None:
                unread.note_guess(piece.n_past, token)


class _Unread:
    """The tokens of one sequence that the block has not read.

    Attributes:
        n_read: number of tokens of the sequence before them.
        ids: these tokens.
        ahead: the token behind the first `n_read` ones if it was read before it was computed.
    """

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, n_read: int) -> None:
        """Go on behind so many tokens, of which there is none at position 0."""
        self.n_read, self.ids = max(1, n_read), list[int]()
        self.ahead: int | None = None

    def add(self, at: int, token: int) -> None:
        """Note a token that was computed, in place of all from its position on."""
        if not self.n_read <= at <= self.n_read + len(self.ids):
            self.begin(at)
        del self.ids[at - self.n_read :]
        if self.ahead == token and at == self.n_read:
            self.n_read += 1
        elif at >= self.n_read:
            self.ids.append(token)
        self.ahead = None

    def note_guess(self, at: int, token: int | None) -> None:
        """Note that all before a position was read, and the token there, if it is known."""
        if 0 <= at - self.n_read <= len(self.ids):
            self.begin(at)
            self.ahead = token

    def rows(self, piece: Piece) -> Rows:
        """Return the unread tokens right before a piece, as far as there still are their pages."""
        at, stop = self.n_read, piece.n_past
        if not at <= stop <= at + len(self.ids):
            at = stop
        while at < stop and any(table[at // PAGE] == GONE for table in piece.tables):
            at = (at // PAGE + 1) * PAGE
        ids = self.ids[at - self.n_read : stop - self.n_read]
        return ids, Batch((piece._replace(n_past=at, n=len(ids)),), len(ids))


def _singles(piece: Piece) -> list[Piece]:
    """Return the tokens of a piece one by one."""
    return [piece._replace(n_past=at, n=1) for at in range(piece.n_past, piece.stop)]
