"""Sizes of the chunks in which GPUs dequantise matrices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.forward.batch import (
    GEMM_TILE,
    GEMM_WAVES,
    MAX_CHUNK,
    MAX_SM,
    MIN_CHUNK,
    chunk_rows,
    largest_chunk,
)

tokens, rows = st.integers(33, 4096), st.integers(1, 300_000)
columns, sms = st.integers(32, 40_000), st.integers(1, 400)


def n_tiles(n_tokens: int, n_rows: int) -> int:
    return -(-n_tokens // GEMM_TILE) * -(-n_rows // GEMM_TILE)


@given(tokens, rows, columns, sms)
def test_chunks_are_even_and_within_bounds(
    n_tokens: int, n_rows: int, n_columns: int, n_sm: int
) -> None:
    step = chunk_rows(n_tokens, n_rows, n_columns, n_sm)
    assert step >= 16
    assert step % 16 == 0
    assert (step - GEMM_TILE) * n_columns <= MAX_CHUNK
    n_chunk = -(-n_rows // step)
    last = n_rows - (n_chunk - 1) * step
    assert last > step - n_chunk * GEMM_TILE


@given(tokens, rows, columns, sms)
def test_each_chunk_keeps_all_multiprocessors_busy(
    n_tokens: int, n_rows: int, n_columns: int, n_sm: int
) -> None:
    step = chunk_rows(n_tokens, n_rows, n_columns, n_sm)
    is_whole = step >= n_rows
    is_most = (step + GEMM_TILE) * n_columns * 2 >= MAX_CHUNK
    has_waves = n_tiles(n_tokens, step) >= GEMM_WAVES * min(n_sm, MAX_SM)
    assert is_whole or is_most or has_waves
    assert is_whole or is_most or step * n_columns > MIN_CHUNK - 16 * n_columns


@given(tokens, rows, columns, sms, st.floats(0, 1))
def test_plans_count_the_largest_chunk(
    n_tokens: int, n_rows: int, n_columns: int, n_sm: int, part: float
) -> None:
    smaller = max(1, int(part * n_rows))
    step = min(chunk_rows(n_tokens, smaller, n_columns, n_sm), smaller)
    assert step * n_columns <= largest_chunk(n_tokens, n_rows, n_columns)
    assert largest_chunk(n_tokens, n_rows, n_columns) <= n_rows * n_columns


@pytest.mark.parametrize(
    ("n_tokens", "shape", "n_sm", "expected"),
    [
        (512, (14336, 4096), 132, 14336),  # 448 tiles; two chunks would have 224, and 264 are due
        (512, (4096, 14336), 132, 4096),  # all that the matrix has
        (512, (14336, 4096), 82, 7168),
        (2048, (14336, 4096), 132, 4864),
        (2048, (28672, 8192), 132, 2304),
        (2048, (128256, 4096), 132, 4224),
        (300, (100, 40), 132, 112),
    ],
)
def test_chunks_of_known_models(
    n_tokens: int, shape: tuple[int, int], n_sm: int, expected: int
) -> None:
    assert chunk_rows(n_tokens, *shape, n_sm) == expected
