"""Codecs for the KV cache types: rows of F32, F16 or BF16, or of GGML blocks.

A block has 32 elements: an F16 scale d, then integers q. In Q8_0, q are signed bytes and x = d q;
in Q4_0, q are nibbles and x = d (q - 8), where byte j holds elements j (low nibble) and j + 16
(high nibble). Blocks have the same bits as those that the gguf package writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from llvmlite import ir
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_row_kernel
from engine.backends.cpu.kernels.language.maths import ints_like
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    VOID,
    Code,
    Value,
    internal,
    vector,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.model.forward.pages import PAGE

BYTES, HALVES = vector(I8), vector(I16)
HALF_BITS = 0x3F000000
"""Bits of 0.5 as F32, whose last bit has the same value as that of a subnormal F16 number."""

MIN_NORMAL = 0x38800000
"""Bits of the smallest normal F16 number, as F32."""

INFINITE, NO_NUMBER = 0x7C00, 0x7E00
"""Bits of infinity and NaN, as F16."""


class CacheCodec(ABC):
    """Reads and writes one cache type.

    Attributes:
        width: number of elements read or written at a time, 16 or 32.
        n_bytes: size of `width` elements in the cache, in bytes.
    """

    width: ClassVar[int]
    n_bytes: ClassVar[int]

    def __init__(self, code: Code, isa: Isa) -> None:
        self.code = code
        self.isa = isa

    @abstractmethod
    def read(self, address: Value) -> list[Value]:
        """Read `width` elements as F32, 16 per vector."""

    @abstractmethod
    def write(self, values: Sequence[Value], address: Value) -> None:
        """Write `width` elements, given as F32, 16 per vector."""


class PlainCodec(CacheCodec):
    """F32 numbers, and the base class for F16 and BF16; a row may have any length."""

    width = LANES
    n_bytes = 4 * LANES
    kind: ClassVar[Any] = FLOATS

    def read(self, address: Value) -> list[Value]:
        return [self._floats(self.code.load(address, self.kind))]

    def read_part(self, address: Value, n: Value) -> Value:
        """Read the first n of 16 elements, followed by zeros."""
        return self._floats(self.code.load_part(address, self.kind, n))

    def write(self, values: Sequence[Value], address: Value) -> None:
        self.code.store(self._held(values[0]), address)

    def write_part(self, value: Value, address: Value, n: Value) -> None:
        """Write the first n of 16 elements."""
        self.code.store_part(self._held(value), address, n)

    def _floats(self, held: Value) -> Value:
        return held

    def _held(self, floats: Value) -> Value:
        return floats


class F16Codec(PlainCodec):
    """F16 numbers."""

    n_bytes = 2 * LANES
    kind = HALVES

    def _floats(self, held: Value) -> Value:
        return self.isa.f16_to_f32(self.code, held)

    def _held(self, floats: Value) -> Value:
        return f32_to_f16(self.code, floats)


class BF16Codec(PlainCodec):
    """BF16 numbers: the upper halves of F32."""

    n_bytes = 2 * LANES
    kind = HALVES

    def _floats(self, held: Value) -> Value:
        return (held.to(INTS, signed=False) << 16).bitcast(FLOATS)

    def _held(self, floats: Value) -> Value:
        bits = floats.bitcast(INTS)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        is_number = floats.equals(floats)
        return self.code.where(is_number, rounded, self.code.constant(INTS, 0x7FC0)).to(HALVES)


class BlockCodec(CacheCodec):
    """Blocks of 32 integers with a scale."""

    width = 32

    @abstractmethod
    def words(self, address: Value) -> Value:
        """Read a block's integers as 32 × i16."""

    def scales(self, addresses: Sequence[Value]) -> Value:
        """Read n blocks' scales as n × F32."""
        return self.isa.f16_to_f32(self.code, self.code.gathered(addresses, I16))


class Q8Codec(BlockCodec):
    """Q8_0 blocks."""

    n_bytes = 34

    def words(self, address: Value) -> Value:
        return self.code.load(address + 2, vector(I8, 32)).to(vector(I16, 32))

    def read(self, address: Value) -> list[Value]:
        code, scale = self.code, scale_at(self, address)
        numbers = (code.load(address + 2 + at, BYTES) for at in (0, LANES))
        return [number.to(INTS).to(FLOATS) * scale for number in numbers]

    def write(self, values: Sequence[Value], address: Value) -> None:
        code = self.code
        largest = code.reduce("max", code.maximum(*(code.unary("fabs", x) for x in values)))
        scale = largest / code.constant(F32, 127.0)
        write_scale(code, scale, address)
        factor = code.splat(inverse(code, scale))
        for n, value in enumerate(values):
            code.store(rounded(code, value * factor).to(BYTES), address + 2 + LANES * n)


class Q4Codec(BlockCodec):
    """Q4_0 blocks."""

    n_bytes = 18

    def words(self, address: Value) -> Value:
        both = self.code.load(address + 2, BYTES)
        nibbles = (both & 15).shuffle(range(2 * LANES), both >> 4)
        return (nibbles - 8).to(vector(I16, 32))

    def read(self, address: Value) -> list[Value]:
        code, scale = self.code, scale_at(self, address)
        both = code.load(address + 2, BYTES).to(INTS, signed=False)
        return [(half - 8).to(FLOATS) * scale for half in (both & 15, both >> 4)]

    def write(self, values: Sequence[Value], address: Value) -> None:
        code = self.code
        scale = self._extreme(values) * (-1 / 8)
        write_scale(code, scale, address)
        factor = code.splat(inverse(code, scale))
        numbers = ((value * factor + 8.5).to(INTS) for value in values)
        low, high = (code.where(n > 15, code.constant(INTS, 15), n) for n in numbers)
        code.store((low | (high << 4)).to(BYTES), address + 2)

    def _extreme(self, values: Sequence[Value]) -> Value:
        """Return the number with the largest magnitude; on a tie, the first."""
        code = self.code
        sizes = [code.unary("fabs", value) for value in values]
        largest = code.reduce("max", code.maximum(*sizes))
        spread, none = code.splat(largest), code.constant(FLOATS, 2.0 * LANES)
        numbers = [code.vector_of(FLOATS, range(n, n + LANES)) for n in (0, LANES)]
        low, high = (
            code.where(size.equals(spread), number, none)
            for size, number in zip(sizes, numbers, strict=True)
        )
        place = code.splat(code.reduce("min", code.minimum(low, high)))
        low, high = (
            code.where(number.equals(place), value, code.constant(FLOATS, -0.0))
            for value, number in zip(values, numbers, strict=True)
        )
        return code.where(largest.equals(largest), code.reduce("add", low + high), largest)


CODECS: Mapping[str, type[CacheCodec]] = {
    "f32": PlainCodec, "f16": F16Codec, "bf16": BF16Codec, "q8_0": Q8Codec, "q4_0": Q4Codec,
}  # fmt: skip
"""Codec for each cache type."""


def scale_at(codec: CacheCodec, address: Value) -> Value:
    """Load a block's scale as F32, in all lanes."""
    return codec.isa.f16_to_f32(codec.code, codec.code.splat(codec.code.load(address, I16)))


def write_scale(code: Code, scale: Value, address: Value) -> None:
    """Store a block's scale as F16."""
    code.store(f32_to_f16(code, scale), address)


def inverse(code: Code, scale: Value) -> Value:
    """Return 1 / scale, or 0 where the scale is 0."""
    return code.where(scale.equals(0.0), scale, code.constant(F32, 1.0) / scale)


def rounded(code: Code, x: Value) -> Value:
    """Round floats to the nearest integers, ties away from zero."""
    size = code.unary("fabs", x)
    whole = size.to(INTS)
    whole = whole + ((size - whole.to(FLOATS)) * 2.0).to(INTS)
    return code.where(x < 0.0, whole * -1, whole)


def f32_to_f16(code: Code, x: Value) -> Value:
    """Convert F32 to F16 (as i16), ties to even; 65520 and larger become infinite."""
    ints, half = ints_like(x.kind), ints_like(x.kind, I16)
    bits = x.bitcast(ints)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFF + ((size >> 13) & 1)) >> 13) - (112 << 10)
    tiny = (size.bitcast(x.kind) + 0.5).bitcast(ints) - HALF_BITS
    result = code.where(size < MIN_NORMAL, tiny, normal)
    result = code.where(result > INFINITE, code.constant(ints, INFINITE), result)
    result = code.where(x.equals(x), result, code.constant(ints, NO_NUMBER))
    return (result | ((bits >> 16) & 0x8000)).to(half)


DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.uint8,
    "q4_0": torch.uint8,
}  # fmt: skip
"""Torch type of the tensors used for each cache type."""


class CacheTensor:
    """One layer's keys or values, (n_kv, n_slots, head_dim), as kernels address them.

    Attributes:
        n_kv, n_slots, head_dim: numbers of key-value heads, slots, and elements per head.
        address: address of the first element.
        stride, head_stride: bytes between slots and between heads.
        fits: whether the kernels can read it: it is on the CPU, in the type's layout, its rows
            contiguous.
    """

    def __init__(self, held: Tensor, kind: str) -> None:
        codec, size = CODECS[kind], held.element_size()
        head_stride, stride, step = held.stride()
        self.n_kv, self.n_slots, width = held.shape
        has_blocks = held.dtype == torch.uint8
        self.head_dim = width // codec.n_bytes * codec.width if has_blocks else width
        self.address = held.data_ptr()
        self.stride, self.head_stride = stride * size, head_stride * size
        self.fits = (
            held.is_cpu
            and held.dtype == DTYPES[kind]
            and step == 1
            and not (has_blocks and width % codec.n_bytes)
        )


ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "n", "cells", "cells_token_stride",
    "cells_head_stride", "positions", "tables",
)  # fmt: skip
"""The kernel's arguments. x is F32, (n_tokens, n_heads, n), with strides in bytes; `cells` is the
address of slot 0 and head 0 in the cache. positions, tables: addresses of n_tokens 64-bit integers:
each token's position, and the address of its sequence's page table. For block types, n must be a
multiple of 32."""


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Emit `store(pool, *ARGUMENTS)` for a cache type."""
    add_run(module)
    _add_row(module, isa, kind)

    def emit(code: Code, given: Named, token: Value) -> None:
        position, table = (
            code.load(given[name] + token * 8, I64) for name in ("positions", "tables")
        )
        slot = code.load(table + position // PAGE * 8, I64) * PAGE + position % PAGE
        x = given["x"] + token * given["token_stride"]
        cells = given["cells"] + slot * given["cells_token_stride"]
        with code.loop(code.number(0), given["n_heads"]) as head:
            goal = cells + head * given["cells_head_stride"]
            code.call("row", VOID, x + head * given["head_stride"], given["n"], goal)

    add_row_kernel(module, "store", ARGUMENTS, lambda given: given["n_heads"] * given["n"], emit)


def _add_row(module: ir.Module, isa: Isa, kind: str) -> None:
    """Emit `row(x, n, cells)`: stores one head for one token."""
    code, (x, n, place) = internal(module, "row", 3)
    codec = CODECS[kind](code, isa)
    n_units = n // codec.width
    with code.loop(code.number(0), n_units) as unit:
        at = x + unit * (4 * codec.width)
        values = [code.load(at + 4 * n, FLOATS) for n in range(0, codec.width, 16)]
        codec.write(values, place + unit * codec.n_bytes)
    if isinstance(codec, PlainCodec):
        with code.when(n % codec.width > 0):
            left = n % codec.width
            value = code.load_part(x + n_units * (4 * codec.width), FLOATS, left)
            codec.write_part(value, place + n_units * codec.n_bytes, left)
    code.builder.ret_void()
