"""Planes have the file's bits, wherever rows and columns are split."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.formats.quants.layout import LAYOUTS
from tests.helpers.kernels import aligned, pack_into, packed
from tests.helpers.planes import TYPES, Parts, read, to_file

N_COLUMNS = 3 * 256
N_BLOCKS = N_COLUMNS // 32

every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


def any_bytes(kind: Kind, n_rows: int) -> NDArray[np.uint8]:
    """Return rows of random bytes, also in scales."""
    block, size = GGML_QUANT_SIZES[kind]
    shape = (n_rows, N_COLUMNS // block * size)
    return np.random.default_rng(int(kind)).integers(0, 256, shape, np.uint8)


def part_of(parts: Parts, first: int, stop: int, sub: int) -> Parts:
    """Return some blocks of 32 columns of the rows."""
    per_block = 32 // sub
    return Parts(
        parts.codes[:, first:stop],
        [numbers[:, first * per_block : stop * per_block] for numbers in parts.scales],
        [numbers[:, first // 8 : -(-stop // 8)] for numbers in parts.supers],
    )


def assert_same(actual: Parts, expected: Parts) -> None:
    assert np.array_equal(actual.codes, expected.codes)
    assert len(actual.scales) == len(expected.scales)
    assert len(actual.supers) == len(expected.supers)
    for a, b in zip(actual.scales + actual.supers, expected.scales + expected.supers, strict=True):
        assert np.array_equal(a, b)


@every_type
@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 50])
def test_planes_have_the_bits_of_the_file(kind: Kind, n_rows: int, pool: ThreadPool) -> None:
    raw = any_bytes(kind, n_rows)
    planes = packed(raw, kind, chosen(), pool)
    parts = read(planes, LAYOUTS[kind], n_rows, N_BLOCKS, 0)
    assert np.array_equal(to_file(parts, kind), raw)


@every_type
@pytest.mark.parametrize(
    ("first", "stop"),
    [(0, 1), (0, 7), (1, 2), (3, 8), (5, 11), (7, 9), (8, 16), (9, 24), (13, 22), (23, 24)],
)
def test_a_cut_may_fall_on_any_block(kind: Kind, first: int, stop: int, pool: ThreadPool) -> None:
    n_rows, layout = 19, LAYOUTS[kind]
    raw = any_bytes(kind, n_rows)
    whole = read(packed(raw, kind, chosen(), pool), layout, n_rows, N_BLOCKS, 0)
    planes = packed(raw, kind, chosen(), pool, first=first, n_blocks=stop - first)
    window = read(planes, layout, n_rows, stop - first, first % 8)
    assert_same(window, part_of(whole, first, stop, layout.sub))


@every_type
def test_rows_may_come_in_chunks_of_any_size(kind: Kind, pool: ThreadPool) -> None:
    raw, n_blocks, first = any_bytes(kind, 50), 13, 3
    expected = packed(raw, kind, chosen(), pool, first=first, n_blocks=n_blocks)
    planes, row = aligned(len(expected)), 0
    for n in (1, 14, 2, 0, 17, 16):
        chunk = raw[row : row + n] if n else raw[:0]
        pack_into(planes, chunk, kind, chosen(), pool, first=first, n_blocks=n_blocks, goal_row=row)
        row += n
    assert row == len(raw)
    assert np.array_equal(planes, expected)


@every_type
def test_a_chunk_writes_only_its_rows(kind: Kind, pool: ThreadPool) -> None:
    raw = any_bytes(kind, 64)
    before = packed(raw, kind, chosen(), pool)
    planes, others = before.copy(), raw[:21] ^ 0xFF
    pack_into(planes, others, kind, chosen(), pool, first=0, n_blocks=N_BLOCKS, goal_row=14)
    expected = raw.copy()
    expected[14:35] = others
    assert np.array_equal(planes, packed(expected, kind, chosen(), pool))
    assert not np.array_equal(planes, before)


@every_type
def test_rows_may_be_strided_and_unaligned(kind: Kind, pool: ThreadPool) -> None:
    raw = any_bytes(kind, 18)
    memory = np.full((18, raw.shape[1] + 5), 0xEE, np.uint8)
    memory[:, 3:-2] = raw
    planes = packed(memory[:, 3:-2], kind, chosen(), pool, n_blocks=N_BLOCKS)
    assert np.array_equal(planes, packed(raw, kind, chosen(), pool))


def test_planes_do_not_depend_on_threads() -> None:
    raw = any_bytes(Kind.Q6_K, 200)
    planes = []
    for n_threads in (1, 2, 5):
        pool = ThreadPool(n_threads)
        planes.append(packed(raw, Kind.Q6_K, chosen(), pool))
        pool.close()
    assert np.array_equal(planes[0], planes[1])
    assert np.array_equal(planes[0], planes[2])
