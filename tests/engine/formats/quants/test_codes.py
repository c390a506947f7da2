"""Types that are packed as codes: their planes hold exactly the weights of the file."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants import encode as codes
from engine.formats.quants.dequantise import QUANTS, dequantise
from engine.formats.quants.encode import coded_rows
from engine.formats.quants.layout import BLOCK, CODED, LAYOUTS, TILE, Layout
from tests.bench.random_blocks import random_tensor
from tests.helpers.kernels import activations, aligned, multiplied, quantised
from tests.helpers.planes import planes_apart

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

N_ROWS, N_COLUMNS = 41, 768
FIRST, N_BLOCKS = 3, 17  # a cut that is none of the file's blocks
GOAL_ROW = 5

every_coded_type = pytest.mark.parametrize("number", CODED, ids=lambda n: QUANTS[n].name)


def kernel(
    name: str, function: str, arguments: tuple[str, ...], build: jit.Build
) -> Callable[..., None]:
    address = jit.addresses(name, chosen(), [function], build)[function]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + len(arguments)))(address)


def packed(raw: Bytes, number: int, first: int, n_blocks: int, goal_row: int) -> Bytes:
    """Return planes (n_tile, tile_bytes) whose rows from `goal_row` on are those of `raw`."""
    tile_bytes = LAYOUTS[number].tile_bytes(n_blocks, 0)
    n_tile = -(-(goal_row + len(raw)) // TILE)
    planes = aligned(n_tile * tile_bytes).reshape(n_tile, tile_bytes)
    rows = coded_rows(torch.from_numpy(raw), number)
    run = kernel(f"pack-{number}", "pack", pack.ARGUMENTS, lambda m: pack.build(m, number))
    pool = ThreadPool(1)
    run(
        pool.address, rows.data_ptr(), rows.shape[1], len(rows), goal_row, first, n_blocks,
        planes.ctypes.data, tile_bytes,
    )  # fmt: skip
    pool.close()
    return planes


def unpacked(planes: Bytes, layout: Layout, n_blocks: int) -> Floats:
    """Return the weights of all rows, as the text of `quants.layout` defines them."""
    high_at, scales_at, _, _ = layout.offsets(n_blocks, 0)
    n_tile, planes = len(planes), planes_apart(planes, layout, n_blocks, FIRST % 8)
    low = planes[:, :high_at].reshape(n_tile, n_blocks, layout.low, 64)
    if layout.low == 4:
        lines = np.concatenate([low & 15, low >> 4], axis=2)
    else:
        lines = np.stack([low >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
    q = lines.reshape(n_tile, n_blocks, 8, 64)
    if layout.high:
        high = planes[:, high_at:scales_at].reshape(n_tile, n_blocks, 1, 64)
        q = q | (high >> np.arange(8, dtype=np.uint8)[:, None] & 1) << layout.low
    numbers = np.array(layout.table)[q] if layout.table else q.astype(np.int64) - layout.zero
    numbers = numbers.reshape(n_tile, n_blocks, 8, TILE, 4).transpose(0, 3, 1, 2, 4)
    numbers = numbers.reshape(n_tile, TILE, n_blocks, BLOCK // layout.sub, layout.sub)
    scales = planes[:, scales_at : scales_at + n_blocks * layout.scale_bytes].copy()
    scales = scales.view("<f4" if layout.scale == "f32" else "<f2").astype(np.float32)
    scales = scales.reshape(n_tile, n_blocks, -1, TILE).transpose(0, 3, 1, 2)
    with np.errstate(invalid="ignore"):
        weights = scales[..., None] * numbers.astype(np.float32)
    return weights.reshape(n_tile * TILE, n_blocks * BLOCK)


def random_rows(number: int) -> Bytes:
    """Return random bytes: each code, sign and scale, infinite and subnormal ones too."""
    info = TYPES[number]
    shape = (N_ROWS, N_COLUMNS // info.block_size * info.type_size)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def finite_rows(number: int) -> Bytes:
    """Return rows with finite scales, whose blocks differ in size by up to 16."""
    info, rng = TYPES[number], np.random.default_rng(number)
    n = N_ROWS * N_COLUMNS // info.block_size
    sizes = 2.0 ** rng.uniform(-4, 0, n)
    blocks = [random_tensor(number, (1, info.block_size), size, rng) for size in sizes]
    return np.concatenate(blocks).reshape(N_ROWS, -1)


def dequantised(raw: Bytes, number: int) -> Floats:
    weights: Floats = dequantise(torch.from_numpy(raw), number).numpy()
    return weights[:, FIRST * BLOCK : (FIRST + N_BLOCKS) * BLOCK]


def test_every_quantised_type_has_planes() -> None:
    """What is stored in blocks need never be widened for the CPU."""
    assert {number for number, quant in QUANTS.items() if quant.block_size > 1} == set(LAYOUTS)
    assert {number for number, quant in QUANTS.items() if quant.codes_of} == set(CODED)


@every_coded_type
def test_planes_hold_the_weights_of_the_file(number: int) -> None:
    """Bit for bit; and the tiles' other rows are left alone."""
    raw = random_rows(number)
    planes = packed(raw, number, FIRST, N_BLOCKS, GOAL_ROW)
    found = unpacked(planes, LAYOUTS[number], N_BLOCKS)[GOAL_ROW : GOAL_ROW + N_ROWS]
    wanted = dequantised(raw, number)
    same = (found.view(np.int32) == wanted.view(np.int32)) | (np.isnan(found) & np.isnan(wanted))
    assert same.all(), f"{(~same).sum()} of {same.size} differ"
    emptied = packed(np.zeros_like(raw), number, FIRST, N_BLOCKS, GOAL_ROW)
    outside = [row for row in range(3 * TILE) if not GOAL_ROW <= row < GOAL_ROW + N_ROWS]
    layout = LAYOUTS[number]
    low = [
        planes_apart(p, layout, N_BLOCKS, FIRST % 8)[:, : layout.low_bytes].reshape(3, -1, TILE, 4)
        for p in (planes, emptied)
    ]
    for row in outside:
        assert not any(part[row // TILE, :, row % TILE].any() for part in low)


@every_coded_type
def test_chunks_of_rows_join_without_a_seam(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one being shorter."""
    raw = torch.from_numpy(finite_rows(number))
    whole = coded_rows(raw, number)
    monkeypatch.setattr(codes, "CHUNK", 1280)
    assert torch.equal(coded_rows(raw, number), whole)


@every_coded_type
@pytest.mark.parametrize("n_tokens", [1, 11])
def test_products_are_those_of_the_weights_and_rounded_activations(
    number: int, n_tokens: int
) -> None:
    """Nothing is rounded but F32 sums, once the activations are bytes."""
    raw, n_columns = finite_rows(number), N_BLOCKS * BLOCK
    planes = packed(raw, number, FIRST, N_BLOCKS, 0)
    x = np.random.default_rng(1).standard_normal((n_tokens, n_columns), dtype=np.float32)
    pool, isa = ThreadPool(2), chosen()
    found = multiplied(planes, N_ROWS, x, number, isa, pool, skip=FIRST % 8)
    rounded = activations(quantised(x, isa, pool), n_tokens, N_BLOCKS, isa)
    pool.close()
    weights = dequantised(raw, number).astype(np.float64)
    wanted = rounded @ weights.T
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()
