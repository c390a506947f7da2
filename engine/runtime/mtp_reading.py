"""Tokens that MTP blocks have not read yet, and a token source that keeps track of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.model.forward.batch import KEPT_STATES, MAX_AT_ONCE, Batch, Piece
from engine.model.forward.pages import GONE, PAGE

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.runtime.interface import TokenSource

Rows = tuple[Sequence[int], Batch]
"""Tokens and the pass that reads them."""

Reading = tuple[int, Rows]
"""Index of an MTP block and the rows that it reads."""


class UnreadTokens:
    """The unread tokens of all sequences, by batch index.

    Args:
        n_blocks: number of MTP blocks. Block k computes the k-th draft; a single one computes all.
    """

    def __init__(self, n_blocks: int = 1) -> None:
        self._n_blocks = n_blocks
        self._of: dict[int, _Text] = {}

    def forget(self, batch_index: int) -> None:
        """Forget the tokens of a sequence."""
        self._of.pop(batch_index, None)

    def note(self, ids: Sequence[int], batch: Batch) -> None:
        """Note a pass over the model's main blocks."""
        row, is_kept = 0, batch.is_of_few_singles
        for piece in batch.pieces:
            text = self._text(piece)
            is_of_image = row == 0 and bool(batch.pictures)  # its id is a placeholder
            if is_kept or (piece.n == 1 and not is_of_image):
                text.add(piece.n_past, ids[row])
            else:
                text.begin(piece.stop)
            row += piece.n

    def is_due(self, piece: Piece, n_ahead: int = 0) -> bool:
        """Return whether a single token would overwrite hidden states that are not read yet.

        Args:
            n_ahead: number of later tokens that may be computed along with it.
        """
        text = self._of.get(piece.batch_index)
        most = KEPT_STATES - self._n_blocks + 1  # drafts also take up slots
        return text is not None and piece.stop + n_ahead - min(text.n_read) >= most

    def due(self, batch: Batch, n_ahead: int = 0) -> Iterator[Reading]:
        """Yield the rows to read before a pass overwrites their hidden states.

        Args:
            n_ahead: see `is_due`.
        """
        firsts = {piece.batch_index: piece for piece in reversed(batch.pieces)}
        lasts = {piece.batch_index: piece for piece in batch.pieces}
        for batch_index, piece in firsts.items():
            if piece.n == 1 and not self.is_due(lasts[batch_index], n_ahead):
                continue
            text = self._text(piece)
            for block in range(self._n_blocks):
                rest = text.rows(block, piece)
                text.note_read(block, piece.n_past)
                if rest[0]:
                    yield block, rest

    def joined(
        self, ids: Sequence[int], batch: Batch, number: int = 0
    ) -> tuple[list[Reading], Reading]:
        """Return the rows to read before a draft, and the draft's pass, which reads the rest.

        Args:
            ids: one token per sequence: the next one to compute, or the last draft.
            batch: positions of these tokens.
            number: number of drafts before these tokens.
        """
        block = min(number, self._n_blocks - 1)
        if block < number:  # the block has computed the drafts' hidden states itself
            return [], (block, (ids, batch))
        for token, piece in zip(ids, batch.pieces, strict=True):
            self._text(piece).add(piece.n_past, token)
        found = (self._text(piece).rows(block, piece) for piece in batch.pieces)
        rests = [rest for rest in found if rest[0]]
        if len(ids) + sum(len(tokens) for tokens, _ in rests) > MAX_AT_ONCE:
            return [(block, rest) for rest in rests], (block, (ids, batch))
        unread = [token for tokens, _ in rests for token in tokens]
        places = [single for _, rest in rests for single in _singles(rest.pieces[0])]
        rows = [*unread, *ids], Batch((*places, *batch.pieces), len(unread))
        return [], (block, rows)

    def note_guess(self, batch: Batch, number: int = 0) -> None:
        """Note that a block has read up to and including these tokens to draft the next ones."""
        if number < self._n_blocks:
            for piece in batch.pieces:
                self._text(piece).note_read(number, piece.stop)

    def _text(self, piece: Piece) -> _Text:
        if piece.batch_index not in self._of:
            self._of[piece.batch_index] = _Text(self._n_blocks)
        return self._of[piece.batch_index]


class _Text:
    """The last tokens of one sequence, including all that blocks have not read.

    A token on which a draft was based is added before it is computed; another token at its position
    replaces it and all that follow.

    Attributes:
        n_read: position up to which each block has read. Block k starts at position k + 1, as there
            are no hidden states before that.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_read = [0] * n_blocks
        self.begin(0)

    def begin(self, n: int) -> None:
        self._first, self._ids = n, list[int]()
        self.n_read = [max(n, block + 1) for block in range(len(self.n_read))]

    def add(self, at: int, token: int) -> None:
        if not at or not self._first <= at <= self._first + len(self._ids):
            self.begin(at)
        index = at - self._first
        if self._ids[index : index + 1] != [token]:
            self._ids[index:] = [token]
            self.n_read = [max(min(n, at), block + 1) for block, n in enumerate(self.n_read)]

    def note_read(self, block: int, n: int) -> None:
        self.n_read[block] = max(self.n_read[block], n)
        n_spare = min(self.n_read) - KEPT_STATES - self._first
        if n_spare > 0:
            del self._ids[:n_spare]
            self._first += n_spare

    def rows(self, block: int, piece: Piece) -> Rows:
        at, stop = self.n_read[block], piece.n_past
        if not at <= stop <= self._first + len(self._ids):
            at = stop
        while at < stop and any(table[at // PAGE] == GONE for table in piece.tables):
            at = (at // PAGE + 1) * PAGE
        ids = self._ids[at - self._first : stop - self._first]
        return ids, Batch((piece._replace(n_past=at, n=len(ids)),), len(ids))


def _singles(piece: Piece) -> list[Piece]:
    return [piece._replace(n_past=at, n=1) for at in range(piece.n_past, piece.stop)]


MAX_AHEAD = 8
"""Maximum number of tokens that a source runs ahead of its reader, plus one that it cannot undo;
their hidden states overwrite unread ones."""


class NotedSource:
    """A token source that notes its tokens, so that an MTP block can read them.

    Before unread hidden states are overwritten, the source pauses and the block reads them.

    Args:
        source: samples the tokens.
        unread: tokens that MTP blocks have not read.
        read: called before unread hidden states would be overwritten, so that the block reads.
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
        if self._unread.is_due(piece, MAX_AHEAD) and self._source.hold(MAX_AHEAD):
            self._read(Batch((piece,), 0))
        found = self._source.next(token, piece, n_left)
        if found is not None:
            self._unread.note([token], Batch((piece,), 0))
        self._last = piece
        return found

    def hold(self, n: int) -> bool:
        return self._source.hold(n)

    def stop(self) -> Sequence[int]:
        """Stop the source; note the tokens that it has computed and cannot undo."""
        found = self._source.stop()
        for token in found:
            assert self._last is not None, "they follow a token that was run"
            self._last = self._last._replace(n_past=self._last.stop)
            self._unread.note([token], Batch((self._last,), 0))
        return found
