"""Calls of CPU kernels for one kind of processor, on numpy arrays."""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import ISAS, Isa
from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.kernels.products import (
    gemm,
    int16_panels,
    panel_packing,
    panels,
    quantised_gemm,
)
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.formats.quants.layout import LAYOUTS, panel_block_bytes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

F16_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
"""Offsets of the F16 numbers in a block, by type."""


def isa_named(name: str) -> Isa:
    return next(kind() for kind in ISAS if kind.name == name)


def aligned(n_bytes: int) -> Bytes:
    """Return zeros at an address that is a multiple of 64."""
    memory = np.zeros(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n_bytes]


def random_rows(kind: Kind, n_rows: int, n_columns: int, *, seed: int = 0) -> Bytes:
    """Return rows of a file with random codes and scales, and factors as large as weights."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (n_rows, n_columns // block, size), np.uint8)
    for offset in F16_OFFSETS[kind.name]:
        factors = rng.normal(0, 0.01, (*raw.shape[:2], 1)).astype("<f2")
        raw[..., offset : offset + 2] = factors.view(np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    return raw.reshape(n_rows, -1)


def _call(address: int, n_arguments: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_arguments)(address)


@cache
def _pack(kind: Kind, isa_name: str) -> Callable[..., None]:
    found = jit.addresses_by_source(
        f"pack-{kind:d}", isa_named(isa_name), ["pack"], lambda m: pack.build(m, kind)
    )
    return _call(found["pack"], 1 + len(pack.ARGUMENTS))


@cache
def _quantise(isa_name: str, x_bytes: int) -> Callable[..., None]:
    isa = isa_named(isa_name)
    found = jit.addresses_by_source(
        f"panels-{x_bytes}",
        isa,
        ["quantise"],
        lambda m: panel_packing.build(m, isa, panel_packing.format_of(isa, x_bytes)),
    )
    return _call(found["quantise"], 1 + len(panels.ARGUMENTS))


@cache
def _multiply(kind: int, isa_name: str, x_bytes: int) -> Callable[..., None]:
    isa, layout = isa_named(isa_name), LAYOUTS[kind]
    found = jit.addresses_by_source(
        f"quantised-gemm-{kind:d}-{x_bytes}",  # as the engine, so that each is compiled once
        isa,
        ["multiply", "multiply_piece"],
        lambda m: quantised_gemm.build(m, isa, layout, x_bytes),
    )
    return _call(found["multiply"], 1 + len(gemm.ARGUMENTS))


def pack_into(
    planes: Bytes, raw: Bytes, kind: Kind, isa: Isa, pool: ThreadPool, *,
    first: int, n_blocks: int, goal_row: int = 0,
) -> None:  # fmt: skip
    """Pack blocks of 32 columns of a file's rows, from block `first` on, into rows of planes."""
    tile_bytes = LAYOUTS[kind].tile_bytes(n_blocks, first % 8)
    pool.wake()
    _pack(kind, isa.name)(
        pool.address, raw.ctypes.data, raw.strides[0], len(raw), goal_row, first, n_blocks,
        planes.ctypes.data, tile_bytes,
    )  # fmt: skip


def packed(
    raw: Bytes,
    kind: Kind,
    isa: Isa,
    pool: ThreadPool,
    *,
    first: int = 0,
    n_blocks: int | None = None,
) -> Bytes:
    """Return the planes of all rows."""
    if n_blocks is None:
        block, size = GGML_QUANT_SIZES[kind]
        n_blocks = raw.shape[1] // size * block // 32 - first
    n_tiles = -(-len(raw) // 16)
    planes = aligned(n_tiles * LAYOUTS[kind].tile_bytes(n_blocks, first % 8))
    pack_into(planes, raw, kind, isa, pool, first=first, n_blocks=n_blocks)
    return planes


def quantised(x: Floats, isa: Isa, pool: ThreadPool, x_bytes: int = 1, skip: int = 0) -> Bytes:
    """Return the panels of activations (tokens, columns)."""
    goal = aligned(panels.quantised_bytes(len(x), x.shape[1] // 32, x_bytes))
    pool.wake()
    _quantise(isa.name, x_bytes)(
        pool.address, x.ctypes.data, x.strides[0], len(x), x.shape[1] // 32, skip,
        goal.ctypes.data,
    )  # fmt: skip
    return goal


def multiplied(
    planes: Bytes, n_rows: int, x: Floats, kind: int, isa: Isa, pool: ThreadPool, *,
    skip: int = 0, tiles_per_piece: int = 2, tokens_per_pass: int = 16, x_bytes: int = 1,
) -> Floats:  # fmt: skip
    """Return products (tokens, rows); check that the memory around them stays as it was."""
    n_blocks = x.shape[1] // 32
    panel = quantised(x, isa, pool, x_bytes, skip)
    out = np.full((len(x) + 1, n_rows + 3), 7.5, np.float32)
    pool.wake()
    _multiply(kind, isa.name, x_bytes)(
        pool.address, planes.ctypes.data, LAYOUTS[kind].tile_bytes(n_blocks, skip), n_blocks, skip,
        panel.ctypes.data, len(x), out.ctypes.data, out.strides[0], n_rows, -(-n_rows // 16),
        tiles_per_piece, tokens_per_pass,
    )  # fmt: skip
    assert (out[:, n_rows:] == 7.5).all()
    assert (out[len(x) :] == 7.5).all()
    return out[: len(x), :n_rows].copy()


def in_columns(panel: Bytes) -> NDArray[np.int8]:
    """Return the numbers of panels, (..., 32 × n), in the order of columns."""
    lines = panel.view(np.int8).reshape(*panel.shape[:-1], -1, 4, 2, 4)
    return lines.swapaxes(-3, -2).reshape(panel.shape)


def units_of(pairs: Bytes, isa: Isa) -> NDArray[np.int64]:
    """Return the scales of 16 columns each, in units, from (..., 8 × n) bytes."""
    if isa.joins_halves:
        words = pairs.copy().view("<u2").reshape(*pairs.shape[:-1], -1, 4)[..., :2]
        return words.reshape(*pairs.shape[:-1], -1).astype(np.int64)
    return pairs.copy().view("<i4").astype(np.int64)


def activations(
    panel: Bytes, n_tokens: int, n_blocks: int, isa: Isa, x_bytes: int = 1
) -> NDArray[np.float64]:
    """Return the values of panels, (tokens, columns); see `cpu.kernels.products.panels`."""
    x = np.empty((n_tokens, n_blocks, 32))
    token, size, per_token = 0, isa.tile_tokens, panel_block_bytes(x_bytes)
    while token < n_tokens:
        while size > n_tokens - token:
            size //= 2
        start, stop = token * n_blocks * per_token, (token + size) * n_blocks * per_token
        group = panel[start:stop].reshape(n_blocks, size * per_token)
        scales_at = size * 32 * x_bytes
        parts = in_columns(group[:, :scales_at]).reshape(n_blocks, x_bytes, size, 32)
        scales = units_of(group[:, scales_at + size * 8 : scales_at + size * 16], isa)
        units = group[:, scales_at + size * 20 : scales_at + size * 24].copy().view("<f4")
        spread = scales.reshape(n_blocks, size, 2).repeat(16, axis=2) * units[..., None].astype(
            float
        )
        numbers = parts[:, 0] if x_bytes == 1 else parts[:, 0] * 255.0 + parts[:, 1]
        x[token : token + size] = (numbers * spread).transpose(1, 0, 2)
        token += size
    return x.reshape(n_tokens, n_blocks * 32)


def int16_activations(panel: Bytes, n_tokens: int, n_blocks: int, isa: Isa) -> NDArray[np.float64]:
    """Return the values of panels of int16, (tokens, columns); see `int16_panels`."""
    x = np.empty((n_tokens, n_blocks, 32))
    token, size, per_token = 0, isa.tile_tokens, int16_panels.FINE_BLOCK_BYTES
    while token < n_tokens:
        while size > n_tokens - token:
            size //= 2
        start, stop = token * n_blocks * per_token, (token + size) * n_blocks * per_token
        group = panel[start:stop].reshape(n_blocks, size * per_token)
        words = group[:, : size * 64].copy().view("<i2").reshape(n_blocks, size, 32)
        factors = group[:, size * 76 : size * 80].copy().view("<f4") * int16_panels.BALANCE
        numbers = (words * factors[..., None]).transpose(1, 0, 2)
        x[token : token + size, :, int16_panels.COLUMN_ORDER] = numbers
        token += size
    return x.reshape(n_tokens, n_blocks * 32)
