"""How fast can one token pass a Q4_K matrix on this CPU, and how exactly?

    pip install numba && python -m tests.bench.kernel_probe [BYTES TO PREFETCH AHEAD]

A probe for the kernels to come, on CPUs with AVX512-VNNI: rows lie in tiles of 16, so that one
vector holds 4 bytes (8 weights) of each; activations are int8 in blocks of 32. It prints the bytes
of the matrix read per second beside what a plain sum reads.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")

import gguf
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

TILE, SUPER, BLOCK = 16, 256, 32
I8, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
INTS, FLOATS = ir.VectorType(I32, TILE), ir.VectorType(F32, TILE)
AHEAD = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
QS_BYTES, SCALE_BYTES, D_BYTES = TILE * SUPER // 2, TILE * 16, TILE * 4


class Emitter:
    """Shorthand for the few instructions that the kernel is made of."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def load(self, address: Any, offset: int, kind: Any) -> Any:
        at = self.b.add(address, ir.Constant(I64, offset))
        value = self.b.load(self.b.inttoptr(at, kind.as_pointer()))
        value.align = 1
        return value

    def prefetch(self, address: Any) -> None:
        """Ask for a line that is read once, and soon."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        ask = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        at = self.b.inttoptr(self.b.add(address, ir.Constant(I64, AHEAD)), I8.as_pointer())
        self.b.call(ask, [at, *(ir.Constant(I32, n) for n in (0, 0, 1))])

    def spread(self, address: Any, offset: int, kind: Any) -> Any:
        """One number for all rows of the tile."""
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.load(address, offset, kind.element)
        first = self.b.insert_element(undefined, one, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * TILE))

    def dot(self, total: Any, weights: Any, x: Any) -> Any:
        """total += four unsigned bytes times four signed ones, per row."""
        kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
        name = "llvm.x86.avx512.vpdpbusd.512"
        return self.b.call(
            cgutils.get_or_insert_function(self.b.module, kind, name), [total, weights, x]
        )

    def widened(self, address: Any, offset: int) -> Any:
        """16 unsigned bytes as 32-bit integers."""
        return self.b.zext(self.load(address, offset, ir.VectorType(I8, TILE)), INTS)

    def halves(self, address: Any, offset: int) -> Any:
        """16 F16 numbers as F32."""
        return self.b.fpext(self.load(address, offset, ir.VectorType(F16, TILE)), FLOATS)


def same(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * TILE)


def super_block(e: Emitter, qs: Any, scales: Any, d: Any, xq: Any, dx: Any, sx: Any) -> Any:
    """What 256 columns add to the 16 rows: Σ d·sc·dx·(q·x) − dmin·m·dx·Σx."""
    b, products, minima = e.b, same(FLOATS, 0.0), same(FLOATS, 0.0)
    nibble = same(INTS, 0x0F0F0F0F)
    for pair in range(4):
        low = high = same(INTS, 0)
        for group in range(8):
            line = (8 * pair + group) * 64
            both = e.load(qs, line, INTS)
            if AHEAD:
                e.prefetch(b.add(qs, ir.Constant(I64, line)))
            x_at = 64 * pair + 4 * group
            low = e.dot(low, b.and_(both, nibble), e.spread(xq, x_at, INTS))
            shifted = b.and_(b.lshr(both, same(INTS, 4)), nibble)
            high = e.dot(high, shifted, e.spread(xq, x_at + 32, INTS))
        for block, dots in ((2 * pair, low), (2 * pair + 1, high)):
            scaled = b.sitofp(b.mul(dots, e.widened(scales, 32 * block)), FLOATS)
            minimum = b.sitofp(e.widened(scales, 32 * block + 16), FLOATS)
            fused = {"flags": ("contract",)}
            products = b.fadd(products, b.fmul(scaled, e.spread(dx, 4 * block, FLOATS)), **fused)
            minima = b.fadd(minima, b.fmul(minimum, e.spread(sx, 4 * block, FLOATS)), **fused)
    return b.fsub(b.fmul(e.halves(d, 0), products), b.fmul(e.halves(d, 32), minima))


@intrinsic
def tile_product(
    typing: Any, qs: Any, scales: Any, d: Any, xq: Any, dx: Any, sx: Any, n_super: Any, out: Any
) -> Any:
    """One tile of 16 rows; all but the count of super-blocks are addresses."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        qs, scales, d, xq, dx, sx, n_super, out = values
        total = cgutils.alloca_once_value(builder, same(FLOATS, 0.0))
        with cgutils.for_range(builder, n_super, intp=I64) as loop:

            def at(base: Any, size: int) -> Any:
                return builder.add(base, builder.mul(loop.index, ir.Constant(I64, size)))

            added = super_block(
                Emitter(builder), at(qs, QS_BYTES), at(scales, SCALE_BYTES), at(d, D_BYTES),
                at(xq, SUPER), at(dx, 32), at(sx, 32),
            )  # fmt: skip
            builder.store(builder.fadd(builder.load(total), added), total)
        stored = builder.store(builder.load(total), builder.inttoptr(out, FLOATS.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return numba.types.void(*(numba.types.int64,) * 8), generate


@numba.njit(parallel=True)
def product(qs, scales, d, xq, dx, sx, out, n_tile, n_super):
    """The whole matrix, tiles shared among threads."""
    for t in numba.prange(n_tile):
        tile_product(
            qs + t * n_super * QS_BYTES, scales + t * n_super * SCALE_BYTES,
            d + t * n_super * D_BYTES, xq, dx, sx, n_super, out + t * 64,
        )  # fmt: skip


def planes(raw: Any, n_out: int, n_in: int) -> list[Any]:
    """Q4_K blocks (144 bytes) as nibbles, scales with minima, and factors, tile by tile."""
    blocks, n_super = raw.reshape(n_out, -1, 144), n_in // SUPER
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate((low & 63, (rest & 15) | ((low >> 6) << 4)), -1)
    minimum = np.concatenate((high & 63, (rest >> 4) | ((high >> 6) << 4)), -1)
    tiles = (n_out // TILE, TILE, n_super)
    factors = blocks[..., :4].copy().view(np.float16).reshape(*tiles, 2)
    return [
        nibbles.reshape(*tiles, 4, 8, 4).transpose(0, 2, 3, 4, 1, 5),
        np.stack((scale, minimum), -1).reshape(*tiles, 8, 2).transpose(0, 2, 3, 4, 1),
        factors.transpose(0, 2, 3, 1),
    ]


def aligned(values: Any) -> Any:
    """A copy on a 64-byte boundary."""
    buffer = np.empty(values.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + values.nbytes]
    copy[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return copy


def best_rate(run: Callable[[], object], n_bytes: int) -> float:
    """GB/s of the fastest of six runs."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return n_bytes / min(times) / 1e9


def main() -> None:
    rng, n_out, n_in, n_copies = np.random.default_rng(0), 8192, 2048, 24
    raw = rng.integers(0, 256, (n_out, n_in // SUPER, 144), np.uint8)
    raw[..., :4] = (rng.random((n_out, n_in // SUPER, 2)) / 100).astype(np.float16).view(np.uint8)
    weights = gguf.quants.dequantize(raw.reshape(n_out, -1), gguf.GGMLQuantizationType.Q4_K)
    x = rng.standard_normal(n_in).astype(np.float32).reshape(-1, BLOCK)
    dx = np.abs(x).max(1) / 127
    xq = np.rint(x / dx[:, None]).astype(np.int8)
    sums = (xq.sum(1, dtype=np.int32) * dx).astype(np.float32)
    inputs, out = [aligned(v) for v in (xq, dx, sums)], np.zeros(n_out, np.float32)
    copies = [[aligned(p) for p in planes(raw, n_out, n_in)] for _ in range(n_copies)]

    def run(parts: list[Any]) -> None:
        addresses = [a.ctypes.data for a in (*parts, *inputs, out)]
        product(*addresses, n_out // TILE, n_in // SUPER)

    run(copies[0])
    exact = weights.astype(np.float64) @ (xq * dx[:, None].astype(np.float64)).reshape(-1)
    error = np.abs(out - exact).max() / np.abs(exact).max()
    sys.stdout.write(f"largest error {error:.1e} of the largest result\n")
    n_bytes = n_copies * sum(p.nbytes for p in copies[0])
    plain = torch.from_numpy(np.concatenate([c[0] for c in copies]).view(np.float32).copy())
    for n_threads in range(1, min(numba.config.NUMBA_NUM_THREADS, 16) + 1):
        numba.set_num_threads(n_threads)
        torch.set_num_threads(n_threads)
        rate = best_rate(lambda: [run(parts) for parts in copies], n_bytes)
        summed = best_rate(plain.sum, plain.nbytes)
        sys.stdout.write(f"{n_threads} threads: {rate:.1f} GB/s, a sum {summed:.1f} GB/s\n")


if __name__ == "__main__":
    main()
