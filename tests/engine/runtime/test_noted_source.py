"""Tokens that a device samples ahead are noted for an MTP block that reads them later."""

from collections.abc import Sequence

from engine.decoding.sampling.sampler import Sampler
from engine.model.forward.batch import KEPT_STATES, Batch, Piece
from engine.runtime.mtp_reading import MAX_AHEAD, NotedSource, UnreadTokens
from engine.sampling_params import SamplingParams


class Counting:
    """A token source whose tokens count up, up to three of them ahead of its reader.

    Args:
        beyond: tokens that it has run when it stops.
    """

    waited_s = 0.0
    is_beyond = False

    def __init__(self, beyond: Sequence[int] = ()) -> None:
        self._beyond, self.n_ahead, self.n_held = beyond, 0, 0

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        return True

    def next(self, token: int, piece: Piece, n_left: int) -> int:
        self.n_ahead = max(0, self.n_ahead - 1) if self.n_held else 3
        self.n_held = max(0, self.n_held - 1)
        return token + 1

    def hold(self, n: int) -> bool:
        self.n_held = n
        return not self.n_ahead

    def stop(self) -> Sequence[int]:
        return self._beyond


def unread_of(unread: UnreadTokens, n_past: int) -> list[int]:
    """Return the tokens that are read before a guess at a position."""
    place = Piece(n_past, 1, ((0,) * 9,), batch_index=2)
    before, (_, (ids, _)) = unread.joined([0], Batch((place,), 0))
    return [*(token for _, (tokens, _) in before for token in tokens), *ids[:-1]]


def test_all_tokens_are_read_once_and_in_time() -> None:
    unread, n_most = UnreadTokens(), 0
    read: list[int] = []
    source = Counting()

    def note_read(batch: Batch) -> None:
        assert not source.n_ahead, "nothing may be under way"
        for _, (ids, places) in unread.due(batch, MAX_AHEAD):
            assert places.pieces[0].n_past == 1 + len(read)
            read.extend(ids)

    noted = NotedSource(source, unread, note_read)
    assert noted.serve(Sampler(SamplingParams()), ())
    unread.note([1], Batch((Piece(0, 1, batch_index=2),), 0))
    n = 3 * KEPT_STATES
    for at in range(1, n):
        noted.next(100 + at, Piece(at, 1, ((0,) * 9,), batch_index=2), 50)
        n_most = max(n_most, at + source.n_ahead - len(read))
    assert [*read, *unread_of(unread, n)] == [100 + at for at in range(1, n)]
    assert KEPT_STATES - 2 * MAX_AHEAD < n_most < KEPT_STATES


def test_tokens_that_cannot_be_undone_are_noted() -> None:
    unread = UnreadTokens()
    noted = NotedSource(Counting(beyond=[7]), unread, lambda batch: None)
    noted.next(5, Piece(1, 1, batch_index=2), 50)
    noted.next(6, Piece(2, 1, batch_index=2), 50)
    assert noted.stop() == [7]
    assert unread_of(unread, 4) == [5, 6, 7]
    assert unread_of(unread, 3) == [5, 6], "who goes on before it has not computed it"
