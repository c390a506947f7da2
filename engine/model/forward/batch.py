"""What one forward pass computes: tokens of one sequence, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.quants.layout import TILE
from engine.load_params import MAX_PARALLEL
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor

MAX_AT_ONCE = MAX_PARALLEL
"""Largest number of sequences of which a pass computes a single token each."""

KEPT_STATES = 4 * MAX_AT_ONCE
"""Number of positions of a sequence whose hidden states are kept for an MTP block: those that it
has not read yet, and of a pass of single tokens behind them."""

Tables = tuple[Sequence[int], ...]
"""For each group of layers, the page of each `PAGE` tokens of a sequence."""


class Piece(NamedTuple):
    """Neighbouring tokens of one sequence.

    Attributes:
        n_past: number of the sequence's tokens that are cached already.
        n: number of tokens to compute.
        tables: see `generation.kv_cache.PagedSequence`; empty for a cache that one sequence has
            alone, where page i is the i-th one.
        state_slot: slot of the sequence's recurrent states behind the tokens.
        batch_index: number of the sequence among those that run, from 0; its last hidden states
            lie there.
        shift: what is added to the tokens' numbers for their positions, where there are pictures
            before them that take fewer positions than tokens (M-RoPE).
        source: slot of the recurrent states before the tokens, which stay there; None for
            `state_slot`. Where it is the slot of the piece before, its tokens follow that one's.
    """

    n_past: int
    n: int
    tables: Tables = ()
    state_slot: int = 0
    batch_index: int = 0
    source: int | None = None
    shift: int = 0

    @property
    def stop(self) -> int:
        """Position after the last of the tokens."""
        return self.n_past + self.n

    @property
    def read_slot(self) -> int:
        """Slot of the recurrent states before the tokens."""
        return self.state_slot if self.source is None else self.source

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
    def checks_drafts(self) -> bool:
        """Whether a sequence has several pieces: guesses, which the pass checks.

        So do single tokens that an MTP block reads along with its guesses.
        """
        if len(self.pieces) == 1:
            return False
        places = {(piece.batch_index, piece.n_past) for piece in self.pieces}
        return len(places) > len({piece.batch_index for piece in self.pieces})

    @property
    def captured_size(self) -> PassSize:
        """Size by which GPUs find the captured pass that computes so many single tokens."""
        return CheckedRows(len(self.pieces)) if self.checks_drafts else len(self.pieces)

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
        return len(self.pieces) <= MAX_AT_ONCE and self.is_of_singles


SMALL_BATCH = 8
"""Largest number of tokens for which GPUs use the kernels of a single one: GEMV kernels read each
weight once, attention reads the cache in short pieces, and a token's bits do not depend on the
other tokens. Above it they round otherwise, but for passes that check guesses: an answer shall be
the one without guesses, see `engine.model.forward.attention`."""

BF16_BATCH = 32
"""Smallest number of tokens for which a backend may dequantise matrices to BF16 for a GEMM."""

PROMPT_BATCH = 512
"""Number of prompt tokens that are computed at once by default. On CPUs, Cancel waits for them."""

LARGE_PROMPT_BATCHES = 2048, 1024
"""Numbers of prompt tokens that GPUs compute at once by default where they have the memory, the
best first: weights are dequantised, and kernels started, once for all tokens of a batch."""

GEMM_TILE = 128
"""Number of rows and of columns of a product that a multiprocessor computes at a time in a GEMM by
the vendor's library. Some of its kernels take twice as many of either."""

GEMM_WAVES = 2
"""Least number of tiles that each multiprocessor computes in the GEMM of a chunk: with one, those
that end first, or get none, idle."""

MIN_CHUNK, MAX_CHUNK = 1 << 24, 1 << 26
"""Numbers of weights between which a GPU dequantises at a time for a GEMM: fewer would not be worth
a launch, more need not fit into memory beside a model."""

MAX_SM = 192
"""Largest number of multiprocessors that chunks are sized for. Plans assume it, as they do not know
the GPU: more multiprocessors never make a chunk smaller."""


@lru_cache(maxsize=1 << 12)
def chunk_rows(n_tokens: int, n_rows: int, n_columns: int, n_sm: int = MAX_SM) -> int:
    """Return the number of rows of a matrix that a GPU dequantises at a time for a GEMM.

    The product of a chunk has `GEMM_WAVES` tiles for each multiprocessor if the matrix has as many
    and `MAX_CHUNK` allows it. All chunks of a matrix have the same size but for `GEMM_TILE` rows
    each.

    Args:
        n_tokens: number of rows that the matrix (n_rows, n_columns) is multiplied with.
        n_sm: number of the GPU's multiprocessors.
    """
    wanted = _wanted_rows(n_tokens, n_columns, n_sm)
    n_chunk = max(1, n_rows // wanted, -(-n_rows * n_columns // MAX_CHUNK))
    even = -(-n_rows // n_chunk)
    unit = GEMM_TILE if even > GEMM_TILE else TILE
    return max(TILE, -(-even // unit) * unit)


def largest_chunk(n_tokens: int, n_rows: int, n_columns: int) -> int:
    """Return the most weights dequantised at a time of any matrix of up to `n_rows` rows."""
    most = min(n_rows, 2 * _wanted_rows(n_tokens, n_columns, MAX_SM) + GEMM_TILE)
    return min(most * n_columns, MAX_CHUNK + GEMM_TILE * n_columns)


def _wanted_rows(n_tokens: int, n_columns: int, n_sm: int) -> int:
    """Return the number of rows whose product has enough tiles."""
    n_tile = -(-GEMM_WAVES * min(n_sm, MAX_SM) // max(1, -(-n_tokens // GEMM_TILE)))
    return max(TILE, GEMM_TILE * n_tile, MIN_CHUNK // max(1, n_columns))


MAX_IN_F32 = 8 << 10
"""Largest value that GPUs exchange in F32, in elements (32 KiB); larger ones go in BF16, but for
passes that check guesses, whose rows have the bits of single ones."""

MAX_ONE_SHOT = 64 << 10
"""Largest value that goes by a one-shot all-reduce, in elements: 8 rows of 8192. Its packets take
as many bytes as F32 (256 KiB), about 20 us on a link of 12 GB/s; for larger values the latency of
copies is small beside the time of the transfer."""

MAX_COPIED_WHOLE = 32 << 10
"""Largest value that goes by copies in F32, in elements; for it latency counts, not bandwidth."""

CAPTURED_ROWS = (1, 2, 4, 8, 16)
"""Numbers of single tokens whose passes GPUs capture, as each graph takes memory of its own."""


def captured_rows(n: int) -> int:
    """Return the least number of single tokens that GPUs capture and that is at least n."""
    return next(size for size in CAPTURED_ROWS if size >= n)


def captured_sizes(n_parallel: int, n_checked: int) -> list[int]:
    """Return the numbers of rows of the passes that GPUs capture, each of which has a graph.

    Args:
        n_parallel: most sequences of which a pass computes a single token each.
        n_checked: most rows of a pass that checks guesses; 0 if none does.
    """
    checked = CAPTURED_ROWS[1 : 1 + CAPTURED_ROWS.index(captured_rows(max(1, n_checked)))]
    return [*CAPTURED_ROWS[: 1 + CAPTURED_ROWS.index(captured_rows(n_parallel))], *checked]


DRAFT_ROWS = 4, 8, 16
"""Numbers of rows of captured passes over an MTP block in which some tokens are only read."""

MAX_DRAFTS_CAPTURED = 8
"""Largest number of sizes of such passes that are captured, those that read nothing among them."""


def guessing_sizes(n_parallel: int) -> list[int]:
    """Return the numbers of rows of the captured passes over an MTP block, in the order of use.

    Args:
        n_parallel: most answers that it guesses for at once.
    """
    alone = [1, *DRAFT_ROWS]
    return alone if n_parallel == 1 else [*alone, captured_rows(n_parallel), *DRAFT_ROWS]


MAX_RECORDED = 2
"""Largest number of sizes of passes over several single tokens that CPUs keep recorded.

A recording keeps all that its pass has computed; those used last stay.
"""


def recorded_rows(n_parallel: int) -> int:
    """Return how many rows recorded passes over up to `n_parallel` single tokens keep at most."""
    return 1 + sum(range(n_parallel, 1, -1)[:MAX_RECORDED])
