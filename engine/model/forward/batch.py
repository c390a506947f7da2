"""The work of one forward pass (tokens of one or several sequences), and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.quants.layout import TILE
from engine.load_params import MAX_PARALLEL
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor

MAX_AT_ONCE = MAX_PARALLEL  # maximum number of sequences with a single token each in a pass

KEPT_STATES = 4 * MAX_AT_ONCE
"""Number of positions per sequence whose hidden states are stored for an MTP block: all unread
ones, plus those of a following single-token pass."""

Tables = tuple[Sequence[int], ...]
"""Page tables of a sequence, one per group of layers, with one entry per `PAGE` tokens."""


class Piece(NamedTuple):
    """Adjacent tokens of one sequence.

    Attributes:
        n_past: number of tokens that are already cached.
        n: number of tokens to compute.
        tables: see `generation.kv_cache.PagedSequence`; empty if the sequence has the cache to
            itself and uses its pages in order.
        state_slot: slot of the recurrent states after the tokens.
        batch_index: index of the sequence among the running ones; its last hidden states are stored
            there.
        shift: offset from token index to position, negative after images, which take fewer
            positions than tokens (M-RoPE).
        source: slot of the recurrent states before the tokens, which is not modified; None for
            `state_slot`. If it is the previous piece's slot, this piece continues that piece.
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
        """Position after the last token."""
        return self.n_past + self.n

    @property
    def read_slot(self) -> int:
        """Slot of the recurrent states before the tokens."""
        return self.state_slot if self.source is None else self.source

    def runs(self, group: int, start: int, stop: int) -> list[range]:
        """Return the cache slots for positions `start` to `stop` in a group of layers, as runs of
        adjacent slots."""
        if not self.tables:
            return [range(start, stop)]
        table, runs = self.tables[group], list[range]()
        for index in range(start // PAGE, -(-stop // PAGE)):
            begin, end = max(start, index * PAGE), min(stop, (index + 1) * PAGE)
            base = (table[index] - index) * PAGE
            if runs and runs[-1].stop == base + begin:
                runs[-1] = range(runs[-1].start, base + end)
            else:
                runs.append(range(base + begin, base + end))
        return runs


FIRST_TOKEN = Piece(0, 1)  # first token of a sequence that has the cache to itself


Places = tuple[Sequence[int], ...]  # time, row and column of each token (M-RoPE); or empty


class PictureRows(NamedTuple):
    """Rows of a pass that belong to an image.

    Attributes:
        row: first of these rows.
        features: image features instead of embeddings, (rows, n_embd), in host memory; further
            columns are added after each of the first blocks, (rows, n_embd) per block.
        whole: the image's interval of positions if all its tokens attend to each other, which
            requires that the pass contains all of them; None for causal attention.
        only_in_windows: whether the tokens do so only in sliding-window layers.
    """

    row: int
    features: Tensor
    whole: tuple[int, int] | None = None
    only_in_windows: bool = False

    @property
    def stop(self) -> int:
        """Row after the last one."""
        return self.row + len(self.features)


class CheckedRows(NamedTuple):
    """Size of a captured pass that verifies draft tokens, as opposed to one over n sequences."""

    n: int


PassSize = int | CheckedRows
"""Number of rows in a captured single-token pass, and whether it verifies draft tokens."""


class Batch(NamedTuple):
    """The rows of a forward pass, which are the tokens of its pieces, in order.

    The first piece may have any number of tokens; the others have one each.

    Attributes:
        first_logit: index of the first row with wanted logits; all later rows' are wanted, too.
        wants_hidden: whether hidden states after the final norm are wanted instead.
        pictures: rows of the first piece that belong to images.
        places: time, row and column of each token in the first piece (M-RoPE), if it has image
            rows; else empty.
    """

    pieces: tuple[Piece, ...]
    first_logit: int
    wants_hidden: bool = False
    pictures: tuple[PictureRows, ...] = ()
    places: Places = ()

    @classmethod
    def of_one(cls, n_past: int, n: int, first_logit: int) -> Batch:
        """Return the batch for a sequence that has the cache to itself."""
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
        """Return the wanted rows, at least the last one, as a batch.

        All rows are kept if a wanted one belongs to an image, since the image's tokens may attend
        to each other.
        """
        n_rows, n = self.n_rows, max(1, self.n_wanted)
        left = n_rows - n
        if not left or any(image.stop > left for image in self.pictures):
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
        """Whether each piece has a single token and no image, so that the pass can be replayed."""
        return not self.pictures and all(piece.n == 1 for piece in self.pieces)

    @property
    def checks_drafts(self) -> bool:
        """Whether a sequence has several pieces: draft tokens to verify, or tokens for an MTP block
        to read."""
        if len(self.pieces) == 1:
            return False
        places = {(piece.batch_index, piece.n_past) for piece in self.pieces}
        return len(places) > len({piece.batch_index for piece in self.pieces})

    @property
    def captured_size(self) -> PassSize:
        """Key of the captured pass for this batch."""
        return CheckedRows(len(self.pieces)) if self.checks_drafts else len(self.pieces)

    def two_way(self, window: int) -> list[tuple[int, int]]:
        """Return the first piece's intervals of positions with bidirectional attention.

        `window` is the layer's sliding window, 0 for full attention.
        """
        return [
            image.whole
            for image in self.pictures
            if image.whole and (window or not image.only_in_windows)
        ]

    @property
    def is_of_few_singles(self) -> bool:
        """Whether the pass consists only of single tokens, few enough for a replay."""
        return len(self.pieces) <= MAX_AT_ONCE and self.is_of_singles


SMALL_BATCH = 8
"""Maximum number of tokens for which GPUs use single-token kernels: GEMV kernels read each weight
once, attention reads the cache in short pieces, and a token's bits do not depend on other tokens.
Larger batches round differently, except when verifying draft tokens, because answers must not
depend on drafting; see `engine.model.forward.attention`."""

BF16_BATCH = 32
"""Minimum number of tokens for which a backend may dequantise matrices to BF16 for a GEMM."""

PROMPT_BATCH = 512
"""Default number of prompt tokens per pass. On CPUs, cancelling waits for the current pass."""

LARGE_PROMPT_BATCHES = 2048, 1024
"""Default numbers of prompt tokens per pass on GPUs with enough memory, best first: larger batches
amortise dequantisation and launches over more tokens."""

GEMM_TILE = 128
"""Rows and columns in a vendor GEMM's output tile; some kernels use twice as many of either."""

GEMM_WAVES = 2
"""Minimum number of tiles per multiprocessor in a chunk's GEMM; with only one, some multiprocessors
would idle."""

MIN_CHUNK, MAX_CHUNK = 1 << 24, 1 << 26
"""Bounds on the number of weights that a GPU dequantises at a time for a GEMM: fewer are not worth
a launch, and more may not fit in memory next to a model."""

MAX_SM = 192
"""Maximum number of multiprocessors for which chunks are sized. Plans, which do not know the GPU,
assume this number because more multiprocessors never make a chunk smaller."""


@lru_cache(maxsize=1 << 12)
def chunk_rows(n_tokens: int, n_rows: int, n_columns: int, n_sm: int = MAX_SM) -> int:
    """Return how many rows of a matrix a GPU dequantises at a time for a GEMM.

    A chunk's product has `GEMM_WAVES` tiles per multiprocessor if the matrix is large enough and
    `MAX_CHUNK` allows it. Chunks of a matrix differ by at most `GEMM_TILE` rows.

    Args:
        n_tokens: number of rows multiplied by the matrix (n_rows, n_columns).
        n_sm: number of the GPU's multiprocessors.
    """
    wanted = _wanted_rows(n_tokens, n_columns, n_sm)
    n_chunk = max(1, n_rows // wanted, -(-n_rows * n_columns // MAX_CHUNK))
    even = -(-n_rows // n_chunk)
    unit = GEMM_TILE if even > GEMM_TILE else TILE
    return max(TILE, -(-even // unit) * unit)


def largest_chunk(n_tokens: int, n_rows: int, n_columns: int) -> int:
    """Return the largest chunk, in weights, of any matrix with up to `n_rows` rows."""
    most = min(n_rows, 2 * _wanted_rows(n_tokens, n_columns, MAX_SM) + GEMM_TILE)
    return min(most * n_columns, MAX_CHUNK + GEMM_TILE * n_columns)


def _wanted_rows(n_tokens: int, n_columns: int, n_sm: int) -> int:
    n_tile = -(-GEMM_WAVES * min(n_sm, MAX_SM) // max(1, -(-n_tokens // GEMM_TILE)))
    return max(TILE, GEMM_TILE * n_tile, MIN_CHUNK // max(1, n_columns))


MAX_IN_F32 = 8 << 10
"""Maximum size, in elements, that GPUs all-reduce in F32 (32 KiB); larger tensors use BF16, except
in passes that verify draft tokens, which need the bits of single-token passes."""

MAX_ONE_SHOT = 64 << 10
"""Maximum size, in elements, of a one-shot all-reduce: 8 rows of 8192. Its packets take as many
bytes as F32 (256 KiB), about 20 us on a 12 GB/s link; for larger tensors the latency of copies is
negligible."""

MAX_COPIED_WHOLE = 32 << 10
"""Maximum size, in elements, of an all-reduce with copies in F32; at this size, latency matters
more than bandwidth."""

CAPTURED_ROWS = (1, 2, 4, 8, 16)
"""Sizes of single-token batches that GPUs capture as graphs; each graph takes memory."""


def captured_rows(n: int) -> int:
    """Return the smallest captured batch size for at least n single tokens."""
    return next(size for size in CAPTURED_ROWS if size >= n)


def captured_sizes(n_parallel: int, n_checked: int) -> list[int]:
    """Return the row counts of the passes that GPUs capture.

    Args:
        n_parallel: maximum number of sequences with a single token each.
        n_checked: maximum number of rows in a pass that verifies draft tokens; 0 if no pass does.
    """
    checked = CAPTURED_ROWS[1 : 1 + CAPTURED_ROWS.index(captured_rows(max(1, n_checked)))]
    return [*CAPTURED_ROWS[: 1 + CAPTURED_ROWS.index(captured_rows(n_parallel))], *checked]


DRAFT_ROWS = 4, 8, 16  # row counts of captured MTP passes in which some tokens are only read
MAX_DRAFTS_CAPTURED = 8  # maximum number of captured MTP pass sizes


def guessing_sizes(n_parallel: int) -> list[int]:
    """Return the row counts of captured MTP passes for up to `n_parallel` answers, in order of
    use."""
    alone = [1, *DRAFT_ROWS]
    return alone if n_parallel == 1 else [*alone, captured_rows(n_parallel), *DRAFT_ROWS]


MAX_RECORDED = 2
"""Number of recorded passes over several single tokens that CPUs keep, one per recent batch size.

A recording keeps all tensors from its pass.
"""


def recorded_rows(n_parallel: int) -> int:
    """Return the maximum number of rows in recorded passes over up to `n_parallel` single
    tokens."""
    return 1 + sum(range(n_parallel, 1, -1)[:MAX_RECORDED])
