"""Products of planes and panels against float64, and the same bits in all ways to compute them."""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import Isa, supported
from engine.backends.cpu.kernels.products.panel_packing import are_int16
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.formats.quants.layout import LAYOUTS
from tests.helpers.kernels import (
    F16_OFFSETS,
    activations,
    in_columns,
    int16_activations,
    multiplied,
    packed,
    quantised,
    random_rows,
    units_of,
)
from tests.helpers.planes import TYPES
from tests.helpers.tiers import paired

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ISAS = supported()
N_COLUMNS = 3 * 256
FIRST, N_BLOCKS = 3, 18  # of 24: partial super-blocks on both sides
N_ROWS = 37

TYPICAL = (Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL)
"""Types with minima, with scales of 16 columns, and with a table: the most different code."""

LEAD = {isa: TYPICAL[n % len(TYPICAL)] for n, isa in enumerate(ISAS)}
"""The type for tests on all instruction sets."""

every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def every_type_and_isa(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrise a test; on other instruction sets, all types but one are slow."""
    cases = [
        pytest.param(
            kind, isa, id=f"{kind.name}-{isa.name}",
            marks=[] if isa is ISAS[0] or kind == LEAD[isa] else [pytest.mark.slow],
        )
        for isa in ISAS for kind in TYPES
    ]  # fmt: skip
    return pytest.mark.parametrize(("kind", "isa"), cases)(test)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


def dequantised(raw: NDArray[np.uint8], kind: Kind) -> Doubles:
    """Return the window's columns, dequantised: (rows, 32 × N_BLOCKS)."""
    return dequantize(raw, kind).astype(np.float64)[:, 32 * FIRST : 32 * (FIRST + N_BLOCKS)]


def random_x(n_tokens: int, *, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n_tokens, 32 * N_BLOCKS), np.float32)


def windowed(raw: NDArray[np.uint8], kind: Kind, isa: Isa, pool: ThreadPool) -> NDArray[np.uint8]:
    """Pack the window's columns into planes."""
    return packed(raw, kind, isa, pool, first=FIRST, n_blocks=N_BLOCKS)


def result(
    raw: NDArray[np.uint8], x: Floats, kind: Kind, isa: Isa, pool: ThreadPool, *,
    tiles_per_piece: int = 2, tokens_per_pass: int = 16,
) -> Floats:  # fmt: skip
    planes = windowed(raw, kind, isa, pool)
    return multiplied(
        planes, len(raw), x, kind, isa, pool, skip=FIRST % 8,
        tiles_per_piece=tiles_per_piece, tokens_per_pass=tokens_per_pass,
    )  # fmt: skip


def coded(x: Floats, isa: Isa, pool: ThreadPool) -> Doubles:
    """Return the rounded activations that the products use."""
    return activations(quantised(x, isa, pool), len(x), x.shape[1] // 32, isa)


def scaled(kind: Kind, codes: int, *, factor: float = 0.01) -> NDArray[np.uint8]:
    """Return rows with equal bytes for all codes and inner scales, and one factor."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.full((N_ROWS, N_COLUMNS // block, size), codes, np.uint8)
    for offset in F16_OFFSETS[kind.name]:
        raw[..., offset : offset + 2] = np.array([factor], "<f2").view(np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = 120
    return raw.reshape(N_ROWS, -1)


@every_isa
def test_panels_round_to_the_nearest_step(isa: Isa, pool: ThreadPool) -> None:
    x = random_x(15)
    x[3, 64:96] = 0
    blocks = x.reshape(15, 2 * N_BLOCKS, 16).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    seen = coded(x, isa, pool).reshape(blocks.shape)
    step = largest / 127 + np.abs(x).max(-1)[:, None, None] / (127 * 32767)  # rounded to units
    assert (np.abs(seen - blocks) <= step * 0.500001).all()
    assert (seen[3, 4:6] == 0).all()


@every_isa
def test_panels_have_the_sums_and_scales_of_the_bytes(isa: Isa, pool: ThreadPool) -> None:
    x = random_x(1)
    panel = quantised(x, isa, pool).reshape(N_BLOCKS, 64)
    halves = in_columns(panel[:, :32]).reshape(N_BLOCKS, 2, 16).sum(-1, dtype=np.int64)
    scales, total = units_of(panel[:, 40:48], isa), panel[:, 48:52].copy().view("<f4")[:, 0]
    assert np.array_equal(panel[:, 32:40].copy().view("<i4"), -128 * halves)
    assert np.array_equal(panel[:, 56:].copy().view("<f4"), scales)
    assert np.allclose(total, (halves * scales).sum(-1), rtol=1e-6)
    assert len(np.unique(panel[:, 52:56])) <= 4
    assert scales.max() == 32767


@every_type_and_isa
def test_products_match_float64(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), random_x(17)
    weights = dequantised(raw, kind)
    out = result(raw, x, kind, isa, pool)
    exact = coded(x, isa, pool) @ weights.T
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()
    ideal = x.astype(np.float64) @ weights.T
    assert ((out - ideal) ** 2).sum() <= 1e-4 * (ideal**2).sum()


@every_type_and_isa
def test_activations_of_one_sign_cost_no_accuracy(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), np.abs(random_x(3))
    weights, seen = dequantised(raw, kind), coded(x, isa, pool)
    out = result(raw, x, kind, isa, pool)
    assert np.abs(out - seen @ weights.T).max() <= 1e-6 * (seen @ np.abs(weights).T).max()


@every_type_and_isa
def test_a_token_has_the_same_bits_in_any_batch(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), random_x(64)
    planes = windowed(raw, kind, isa, pool)
    together = multiplied(planes, N_ROWS, x, kind, isa, pool, skip=FIRST % 8, tokens_per_pass=64)
    for n in (*range(1, 10), 17):
        for start in (0, 5):
            out = multiplied(planes, N_ROWS, x[start : start + n], kind, isa, pool, skip=FIRST % 8)
            assert np.array_equal(out, together[start : start + n]), n


@pytest.mark.parametrize(
    ("kind", "isa"),
    paired([Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.Q4_1, Kind.Q2_K, Kind.IQ4_NL], ISAS),
    ids=lambda case: case.name,
)
def test_activations_of_two_bytes_are_finer(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), random_x(9)
    planes, weights = windowed(raw, kind, isa, pool), dequantised(raw, kind)
    out = multiplied(planes, N_ROWS, x, kind, isa, pool, skip=FIRST % 8, x_bytes=2)
    panel, has_words = quantised(x, isa, pool, 2, FIRST % 8), are_int16(isa, 2)
    seen = (
        int16_activations(panel, 9, N_BLOCKS, isa)
        if has_words
        else activations(panel, 9, N_BLOCKS, isa, 2)
    )
    assert np.abs(seen - x).max() <= np.abs(x).max() / (4096 if has_words else 32512)
    exact = seen @ weights.T
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()
    ideal = x.astype(np.float64) @ weights.T
    assert ((out - ideal) ** 2).sum() <= (3e-8 if has_words else 1e-8) * (ideal**2).sum()
    for n in range(1, 9):
        part = multiplied(planes, N_ROWS, x[:n], kind, isa, pool, skip=FIRST % 8, x_bytes=2)
        assert np.array_equal(part, out[:n]), n


@every_isa
@pytest.mark.parametrize("x_bytes", [1, 2])
def test_threads_that_share_columns_pack_the_same_bytes(isa: Isa, x_bytes: int) -> None:
    """One thread packs whole tokens, three threads groups of 256 columns, also partial ones."""
    with closing(ThreadPool(1)) as one, closing(ThreadPool(3)) as three:
        for n_tokens, n_columns, skip in ((1, 8192, 0), (3, 2080, 5), (8, 576, 1), (9, 1024, 7)):
            x = np.random.default_rng(skip).normal(0, 1, (n_tokens, n_columns)).astype(np.float32)
            alone, shared = (quantised(x, isa, pool, x_bytes, skip) for pool in (one, three))
            assert alone.any()
            assert np.array_equal(alone, shared), (n_tokens, n_columns, skip)


@every_isa
def test_bits_do_not_depend_on_threads_and_pieces(isa: Isa) -> None:
    kind, x = LEAD[isa], random_x(33)
    raw = random_rows(kind, 150, N_COLUMNS)
    results = []
    for n_threads in (1, 2, 5):
        pool = ThreadPool(n_threads)
        results += [
            result(raw, x, kind, isa, pool, tiles_per_piece=tiles, tokens_per_pass=tokens)
            for tiles in (1, 3, 10, 100)
            for tokens in (8, 16, 64)
        ]
        pool.close()
    assert all(np.array_equal(results[0], other) for other in results[1:])


@every_type_and_isa
def test_extreme_codes_do_not_overflow(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    for codes in (0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x88, 0x77):
        check_codes(codes, kind, isa, pool)


def check_codes(codes: int, kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw = scaled(kind, codes)
    x = np.ones((4, 32 * N_BLOCKS), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 2::4] = x[3, 3::4] = -1
    weights = dequantised(raw, kind)
    out = result(raw, x, kind, isa, pool)
    exact, largest = x.astype(np.float64) @ weights.T, np.abs(weights).max() * x.shape[1]
    assert np.abs(out - exact).max() <= 1e-6 * largest, hex(codes)


@every_type_and_isa
def test_zeros_give_zeros(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw = random_rows(kind, N_ROWS, N_COLUMNS)
    nothing = np.zeros((3, 32 * N_BLOCKS), np.float32)
    assert (result(raw, nothing, kind, isa, pool) == 0).all()
    if F16_OFFSETS[kind.name]:
        assert (result(scaled(kind, 0x9D, factor=0), random_x(3), kind, isa, pool) == 0).all()


@every_type_and_isa
def test_nan_and_infinity_become_nan(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), random_x(9)
    good, others = result(raw, x, kind, isa, pool), np.arange(9) != 4
    for bad in (np.nan, np.inf, -np.inf):
        x[4, 77] = bad
        out = result(raw, x, kind, isa, pool)
        assert not np.isfinite(out[4]).any()
        assert np.array_equal(out[others], good[others])


@every_isa
def test_tiny_numbers_count_as_zeros(isa: Isa, pool: ThreadPool) -> None:
    kind = LEAD[isa]
    x = np.full((1, 32 * N_BLOCKS), 1e-41, np.float32)
    assert (result(random_rows(kind, N_ROWS, N_COLUMNS), x, kind, isa, pool) == 0).all()


@every_type_and_isa
def test_a_whole_row_of_the_file(kind: Kind, isa: Isa, pool: ThreadPool) -> None:
    raw = random_rows(kind, 16, N_COLUMNS, seed=5)
    x = np.random.default_rng(6).standard_normal((2, N_COLUMNS), np.float32)
    out = multiplied(packed(raw, kind, isa, pool), 16, x, kind, isa, pool)
    exact = coded(x, isa, pool) @ dequantize(raw, kind).astype(np.float64).T
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


def test_no_tokens(pool: ThreadPool) -> None:
    isa, kind = ISAS[0], Kind.Q4_K
    raw, x = random_rows(kind, N_ROWS, N_COLUMNS), random_x(2)
    assert result(raw, x[:0], kind, isa, pool).shape == (0, N_ROWS)
    assert result(raw[:0], x, kind, isa, pool).shape == (2, 0)


def test_every_layout_that_is_packed_has_a_test() -> None:
    assert set(TYPES) <= set(LAYOUTS)
