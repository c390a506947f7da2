"""Numbers of tokens at which backends change kernels, and of rows that they dequantise at a time.

Sizes at which GPUs change how they exchange values are here as well.
Planning predicts memory and time by them.
"""

from functools import lru_cache

from engine.formats.quants.layout import TILE

SMALL_BATCH = 8
"""Largest number of tokens for which GPUs use the kernels of a single one: GEMV kernels read each
weight once, attention reads the cache in short pieces, and a token's bits do not depend on the
other tokens. Above it they round otherwise, but for passes that check guesses: an answer shall be
the one without guesses, see `engine.backends.reference.few_rows`."""

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

LEAST_CHUNK, MOST_CHUNK = 1 << 24, 1 << 26
"""Numbers of weights between which a GPU dequantises at a time for a GEMM: fewer would not be worth
a launch, more need not fit into memory beside a model."""

MOST_SM = 192
"""Largest number of multiprocessors that chunks are sized for. Plans assume it, as they do not know
the GPU: more multiprocessors never make a chunk smaller."""


@lru_cache(maxsize=1 << 12)
def chunk_rows(n_tokens: int, n_rows: int, n_columns: int, n_sm: int = MOST_SM) -> int:
    """Return the number of rows of a matrix that a GPU dequantises at a time for a GEMM.

    The product of a chunk has `GEMM_WAVES` tiles for each multiprocessor if the matrix has as many
    and `MOST_CHUNK` allows it. All chunks of a matrix have the same size but for `GEMM_TILE` rows
    each.

    Args:
        n_tokens: number of rows that the matrix (n_rows, n_columns) is multiplied with.
        n_sm: number of the GPU's multiprocessors.
    """
    wanted = _wanted_rows(n_tokens, n_columns, n_sm)
    n_chunk = max(1, n_rows // wanted, -(-n_rows * n_columns // MOST_CHUNK))
    even = -(-n_rows // n_chunk)
    unit = GEMM_TILE if even > GEMM_TILE else TILE
    return max(TILE, -(-even // unit) * unit)


def largest_chunk(n_tokens: int, n_rows: int, n_columns: int) -> int:
    """Return the most weights dequantised at a time of any matrix of up to `n_rows` rows."""
    most = min(n_rows, 2 * _wanted_rows(n_tokens, n_columns, MOST_SM) + GEMM_TILE)
    return min(most * n_columns, MOST_CHUNK + GEMM_TILE * n_columns)


def _wanted_rows(n_tokens: int, n_columns: int, n_sm: int) -> int:
    """Return the number of rows whose product has enough tiles."""
    n_tile = -(-GEMM_WAVES * min(n_sm, MOST_SM) // max(1, -(-n_tokens // GEMM_TILE)))
    return max(TILE, GEMM_TILE * n_tile, LEAST_CHUNK // max(1, n_columns))


MOST_IN_F32 = 8 << 10
"""Largest value that GPUs exchange in F32, in elements (32 KiB); larger ones go in BF16, but for
passes that check guesses, whose rows have the bits of single ones."""

MOST_ONE_SHOT = 64 << 10
"""Largest value that goes by a one-shot all-reduce, in elements: 8 rows of 8192. Its packets take
as many bytes as F32 (256 KiB), about 20 us on a link of 12 GB/s; for larger values the latency of
copies is small beside the time of the transfer."""

MOST_COPIED_WHOLE = 32 << 10
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


GUESSING_ROWS = 4, 8, 16
"""Numbers of rows of captured passes over an MTP block in which some tokens are only read."""

MOST_GUESSES_CAPTURED = 8
"""Largest number of sizes of such passes that are captured, those that read nothing among them."""


def guessing_sizes(n_parallel: int) -> list[int]:
    """Return the numbers of rows of the captured passes over an MTP block, in the order of use.

    Args:
        n_parallel: most answers that it guesses for at once.
    """
    alone = [1, *GUESSING_ROWS]
    return alone if n_parallel == 1 else [*alone, captured_rows(n_parallel), *GUESSING_ROWS]


MOST_RECORDED = 2
"""Largest number of sizes of passes over several single tokens that CPUs keep recorded.

A recording keeps all that its pass has computed; those used last stay.
"""


def recorded_rows(n_parallel: int) -> int:
    """Return how many rows recorded passes over up to `n_parallel` single tokens keep at most."""
    return 1 + sum(range(n_parallel, 1, -1)[:MOST_RECORDED])
